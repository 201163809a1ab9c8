"""Which blocks stay on the device where there is no room for all of them."""

from __future__ import annotations

from collections.abc import Sequence

from bmforge.errors import ConfigError

__all__ = ["NUM_SLOTS", "choose_resident", "smallest_room", "spread_resident"]

# Of the blocks that come and go one computes while the other is on its way.
NUM_SLOTS = 2


def spread_resident(num_blocks: int, num_resident: int) -> list[int]:
    """Return which of some blocks stay, evenly spread, so that copies hide behind computing.

    Args:
        num_blocks: blocks that run one after the other.
        num_resident: how many of them stay.

    Raises:
        ConfigError: fewer than none or more than all.

    Source: ``calc_fixed_layers`` of BMInf's scheduler: of L blocks of which S do not stay, block i
        stays where ``(i + 1) * S // L`` is what it was for the block before.
    """
    if not 0 <= num_resident <= num_blocks:
        raise ConfigError(f"num_resident={num_resident} must be from 0 to num_blocks={num_blocks}.")
    moving = num_blocks - num_resident
    return [
        block
        for block in range(num_blocks)
        if (block + 1) * moving // num_blocks == block * moving // num_blocks
    ]


def choose_resident(stacks: Sequence[Sequence[int]], room_bytes: int) -> list[list[int]] | None:
    """Return the blocks of every stack that stay such that the fewest bytes come and go.

    Blocks that come and go share `NUM_SLOTS` slots as large as the largest of them, so one that is
    much larger than the others may better stay: every size is tried as the largest to move.

    Args:
        stacks: bytes of each block; of several stacks the one whose blocks are the last to leave
            comes first.
        room_bytes: for blocks that stay and for slots.

    Returns:
        block numbers by stack; None where the room is too small for any choice.
    """
    sizes = [size for stack in stacks for size in stack]
    if sum(sizes) <= room_bytes:
        return [list(range(len(stack))) for stack in stacks]
    best: tuple[list[int], list[list[int]]] | None = None
    for largest in sorted(set(sizes)):
        left = room_bytes - NUM_SLOTS * largest - sum(size for size in sizes if size > largest)
        if left < 0:
            continue
        kept, moved = [], []
        for stack in stacks:
            ids = _fill(stack, largest, left)
            used = sum(stack[i] for i in ids)
            left -= sum(stack[i] for i in ids if stack[i] <= largest)
            kept.append(ids)
            moved.append(sum(stack) - used)
        if best is None or moved < best[0]:
            best = moved, kept
    return None if best is None else best[1]


def _fill(stack: Sequence[int], largest: int, room_bytes: int) -> list[int]:
    """Return the blocks of one stack that stay: all above `largest`, of the others what fits."""
    movable = [i for i, size in enumerate(stack) if size <= largest]
    for count in range(len(movable), -1, -1):
        chosen = [movable[place] for place in spread_resident(len(movable), count)]
        if sum(stack[i] for i in chosen) <= room_bytes:
            break
    return sorted({*chosen, *(i for i, size in enumerate(stack) if size > largest)})


def smallest_room(stacks: Sequence[Sequence[int]]) -> int:
    """Return the least room with which `choose_resident` finds a choice; 0 for no blocks."""
    sizes = [size for stack in stacks for size in stack]
    slots = [NUM_SLOTS * size + sum(s for s in sizes if s > size) for size in set(sizes)]
    return min([sum(sizes), *slots])

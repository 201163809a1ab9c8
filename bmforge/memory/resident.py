"""Chooses which blocks stay on the device if they do not all fit."""

from __future__ import annotations

from collections.abc import Sequence

from bmforge.errors import ConfigError

__all__ = ["NUM_SLOTS", "choose_resident", "min_resident_bytes", "spread_resident"]

# Double buffering: one streamed block computes while the next is copied.
NUM_SLOTS = 2


def spread_resident(num_blocks: int, num_resident: int) -> list[int]:
    """Return the indices of resident blocks, evenly spread so that copying overlaps compute.

    Args:
        num_blocks: number of consecutive blocks.
        num_resident: number of resident blocks.

    Raises:
        ConfigError: `num_resident` is negative or more than `num_blocks`.

    Source: ``calc_fixed_layers`` of BMInf's scheduler: with S of L blocks streamed, block i is
    resident if ``(i + 1) * S // L`` equals ``i * S // L``.
    """
    if not 0 <= num_resident <= num_blocks:
        raise ConfigError(
            f"num_resident={num_resident} is out of range (0 to num_blocks={num_blocks})."
        )
    moving = num_blocks - num_resident
    return [
        block
        for block in range(num_blocks)
        if (block + 1) * moving // num_blocks == block * moving // num_blocks
    ]


def choose_resident(stacks: Sequence[Sequence[int]], room_bytes: int) -> list[list[int]] | None:
    """Choose the resident blocks of every stack such that as few bytes as possible are streamed.

    Streamed blocks share `NUM_SLOTS` slots, each as large as the largest streamed block. It can
    therefore pay to keep a very large block resident, so every block size is tried as the largest
    streamed one.

    Args:
        stacks: sizes of the blocks in bytes, per stack; blocks of earlier stacks become resident
            first.
        room_bytes: memory for resident blocks and slots together.

    Returns:
        indices of the resident blocks, per stack; None if the budget is too small.
    """
    sizes = [size for stack in stacks for size in stack]
    if sum(sizes) <= room_bytes:
        return [list(range(len(stack))) for stack in stacks]
    best: tuple[list[int], list[list[int]]] | None = None
    for largest in sorted(set(sizes)):
        left = room_bytes - NUM_SLOTS * largest - sum(size for size in sizes if size > largest)
        if left < 0:
            continue
        resident, moved = [], []
        for stack in stacks:
            ids = _fill(stack, largest, left)
            used = sum(stack[i] for i in ids)
            # Blocks above `largest` were subtracted before the loop over the stacks.
            left -= sum(stack[i] for i in ids if stack[i] <= largest)
            resident.append(ids)
            moved.append(sum(stack) - used)
        if best is None or moved < best[0]:
            best = moved, resident
    return None if best is None else best[1]


def _fill(stack: Sequence[int], largest: int, room_bytes: int) -> list[int]:
    """Return the indices of resident blocks: those larger than `largest`, and more if they fit."""
    movable = [i for i, size in enumerate(stack) if size <= largest]
    # Blocks differ in size, so the largest number that fits is searched, not computed.
    for count in range(len(movable), -1, -1):
        chosen = [movable[index] for index in spread_resident(len(movable), count)]
        if sum(stack[i] for i in chosen) <= room_bytes:
            break
    return sorted({*chosen, *(i for i, size in enumerate(stack) if size > largest)})


def min_resident_bytes(stacks: Sequence[Sequence[int]]) -> int:
    """Return the smallest budget for which `choose_resident` succeeds; 0 without blocks."""
    sizes = [size for stack in stacks for size in stack]
    slots = [NUM_SLOTS * size + sum(s for s in sizes if s > size) for size in set(sizes)]
    return min([sum(sizes), *slots])

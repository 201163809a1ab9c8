"""Which blocks stay: BMInf's vectors, and the choice with the fewest bytes that come and go."""

from __future__ import annotations

import itertools
import random

import pytest

from bmforge.errors import ConfigError
from bmforge.memory.resident import NUM_SLOTS, choose_resident, min_resident_bytes, spread_resident


@pytest.mark.parametrize(
    ("blocks", "resident", "expected"),
    [
        (12, 4, [0, 3, 6, 9]),
        (24, 10, [0, 2, 4, 7, 9, 12, 14, 16, 19, 21]),
        (48, 0, []),
        (5, 5, [0, 1, 2, 3, 4]),
        (0, 0, []),
    ],
)
def test_bminfs_vectors(blocks: int, resident: int, expected: list[int]) -> None:
    """What its scheduler's `calc_fixed_layers` returned when it was run."""
    assert spread_resident(blocks, resident) == expected


def test_every_spread_is_even() -> None:
    """As many as asked; between two that stay there are as many as elsewhere, give or take one."""
    for blocks, resident in itertools.product(range(1, 30), repeat=2):
        if resident > blocks:
            with pytest.raises(ConfigError, match="num_resident"):
                spread_resident(blocks, resident)
            continue
        places = spread_resident(blocks, resident)
        assert len(places) == resident
        gaps = {b - a for a, b in itertools.pairwise(places)}
        assert not gaps or max(gaps) - min(gaps) <= 1


def room_taken(stacks: list[list[int]], kept: list[list[int]]) -> int:
    """What a choice needs: the blocks that stay, and two slots as large as the largest other."""
    moved = [
        s[i] for s, ids in zip(stacks, kept, strict=True) for i in range(len(s)) if i not in ids
    ]
    stays = sum(map(sum, stacks)) - sum(moved)
    return stays + NUM_SLOTS * max(moved, default=0)


def test_choice_fits_and_beats_others() -> None:
    """Against every choice there is: it fits, exists whenever one does, and of equal blocks as many
    stay as can."""
    draw = random.Random(0)
    for _ in range(300):
        equal = draw.random() < 0.3
        sizes = [draw.choice([5] if equal else [2, 5, 5, 20]) for _ in range(draw.randint(1, 6))]
        room = draw.randint(0, sum(sizes) + 5)
        every = [
            [list(ids)]
            for count in range(len(sizes) + 1)
            for ids in itertools.combinations(range(len(sizes)), count)
        ]
        needed = {str(kept): room_taken([sizes], kept) for kept in every}
        assert min_resident_bytes([sizes]) == min(needed.values())
        kept = choose_resident([sizes], room)
        if kept is None:
            assert min(needed.values()) > room
            continue
        assert needed[str(kept)] <= room
        if equal:
            most = max(len(ids[0]) for ids in every if needed[str(ids)] <= room)
            assert len(kept[0]) == most


def test_first_stack_leaves_last() -> None:
    """The encoder's blocks stay only in what has no room for one more of the decoder's."""
    decoder, encoder = [6] * 4, [4] * 4
    for room in range(10, 40):
        kept = choose_resident([decoder, encoder], room)
        if kept is None:
            assert room < 12
            continue
        if len(kept[0]) < 4:
            slots = NUM_SLOTS * 6
            assert room - slots - 6 * len(kept[0]) < 6, room
    assert choose_resident([decoder, encoder], 40) == [[0, 1, 2, 3]] * 2


def test_one_large_block_stays() -> None:
    """Two slots of its size would take more than it does."""
    assert choose_resident([[1, 1, 1, 50, 1, 1]], 53) == [[0, 3]]
    assert choose_resident([[1, 1, 1, 50, 1, 1]], 51) is None
    assert min_resident_bytes([[1, 1, 1, 50, 1, 1]]) == 52

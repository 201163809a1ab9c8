"""Masks against brute force and a second, plain implementation."""

from __future__ import annotations

from itertools import combinations, permutations

import pytest
import torch

from bmforge.compress.prune.masks import (
    cubic_share,
    keep_2_of_4,
    keep_2_of_4_both_ways,
    keep_largest,
    transposable_patterns,
)
from bmforge.errors import ConfigError


def scores(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_two_of_four_is_the_best_of_six() -> None:
    found = scores(6, 20)
    mask = keep_2_of_4(found)
    for row in range(6):
        for first in range(0, 20, 4):
            four, kept = found[row, first : first + 4], mask[row, first : first + 4]
            assert kept.sum() == 2
            best = max(float(four[list(pair)].sum()) for pair in combinations(range(4), 2))
            assert float(four[kept].sum()) == pytest.approx(best, abs=0)


def test_of_equal_ones_the_last_stay() -> None:
    assert keep_2_of_4(torch.ones(1, 4)).tolist() == [[False, False, True, True]]
    assert keep_largest(torch.zeros(7), 3).tolist() == [False] * 3 + [True] * 4


def plain_both_ways(block: torch.Tensor) -> tuple[float, float]:
    """The best and the greedy sum of a 4 x 4 block, written down without tensors."""
    values = block.tolist()
    pairs = list(combinations(range(4), 2))
    best = 0.0
    for a in pairs:
        for b in pairs:
            for c in pairs:
                used = [sum(j in p for p in (a, b, c)) for j in range(4)]
                if max(used) > 2:
                    continue
                d = [j for j in range(4) if used[j] < 2]
                if len(d) != 2 or any(used[j] != 1 for j in d):
                    continue
                rows = (a, b, c, tuple(d))
                best = max(best, sum(values[i][j] for i in range(4) for j in rows[i]))
    order = sorted(((values[i][j], i, j) for i in range(4) for j in range(4)), reverse=True)
    rows_used, columns_used, greedy = [0] * 4, [0] * 4, 0.0
    for value, i, j in order:
        if rows_used[i] < 2 and columns_used[j] < 2:
            rows_used[i] += 1
            columns_used[j] += 1
            greedy += value
    return best, greedy


def test_both_ways_against_a_second_implementation() -> None:
    found = scores(12, 16, seed=3)
    exact, greedy = (keep_2_of_4_both_ways(found, exact=one) for one in (True, False))
    is_better = False
    for i in range(0, 12, 4):
        for j in range(0, 16, 4):
            here = (slice(i, i + 4), slice(j, j + 4))
            best, plain = plain_both_ways(found[here])
            assert float(found[here][exact[here]].sum()) == pytest.approx(best, rel=1e-12)
            assert float(found[here][greedy[here]].sum()) == pytest.approx(plain, rel=1e-12)
            assert best >= plain - 1e-12
            is_better |= best > plain + 1e-9
            assert exact[here].sum(0).tolist() == exact[here].sum(1).tolist() == [2] * 4
            assert greedy[here].sum(0).max() <= 2
            assert greedy[here].sum(1).max() <= 2
    assert is_better


def test_there_are_ninety_masks() -> None:
    """As many as matrices of 0 and 1 with two in every row and column: 90 (OEIS A001499)."""
    patterns = transposable_patterns()
    assert len(patterns) == len(set(patterns)) == 90
    for order in permutations(range(4)):
        turned = {tuple(p[4 * i + j] for i in order for j in range(4)) for p in patterns}
        assert turned == set(patterns)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.77])
def test_the_number_of_zeros_is_exact(share: float) -> None:
    found = scores(9, 30).mul(4).round()  # many equal ones
    zeros = round(share * found.numel())
    mask = keep_largest(found, zeros)
    assert (~mask).sum() == zeros
    assert found[mask].min() >= found[~mask].max()
    rows = keep_largest(found, round(share * 30), by_row=True)
    assert set((~rows).sum(1).tolist()) == {round(share * 30)}


@pytest.mark.parametrize(("rows", "columns"), [(4, 6), (6, 4)])
def test_groups_that_do_not_fit(rows: int, columns: int) -> None:
    with pytest.raises(ConfigError, match=r"a multiple of 4, not 6 \(nearest: 4 or 8\)"):
        keep_2_of_4_both_ways(scores(rows, columns))
    if columns == 6:
        with pytest.raises(ConfigError, match="rows whose number of weights"):
            keep_2_of_4(scores(rows, columns))


def test_the_cubic_schedule() -> None:
    """Its ends, its middle (1 - 1/8 of the share), and that it never falls."""
    found = [cubic_share(step, 10, 20, 0.8) for step in range(40)]
    assert found[:10] == [0.0] * 10
    assert found[10] == 0.0
    assert found[20] == pytest.approx(0.8 * 7 / 8)
    assert found[30:] == [pytest.approx(0.8)] * 10
    assert found == sorted(found)
    assert cubic_share(5, 5, 0, 0.5) == 0.5

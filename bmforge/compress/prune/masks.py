"""Selects pruning masks: pure functions from scores to bool masks (True for kept weights).

Groups of four are along a matrix's last dim (the input), as hardware-accelerated 2:4 products
require.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations, product

import torch
from torch import Tensor

from bmforge.errors import ConfigError

__all__ = [
    "transposable_patterns",
    "cubic_share",
    "keep_2_of_4",
    "keep_2_of_4_both_ways",
    "keep_largest",
]

_GROUP = 4
# Number of 4 x 4 blocks that are compared with the 90 masks at a time.
_BLOCKS_AT_ONCE = 1 << 16


def keep_largest(scores: Tensor, zeros: int, *, by_row: bool = False) -> Tensor:
    """Return the mask that prunes the weights with the `zeros` smallest scores.

    Among equal scores the first ones are pruned, so that the number is exact.

    Args:
        scores: finite scores.
        zeros: number of weights to prune, in total or per row.
        by_row: select in every row separately.

    Shape:
        scores: (rows, columns), or any without `by_row`; returns the same
    """
    flat = scores.flatten(1) if by_row else scores.reshape(1, -1)
    mask = torch.ones_like(flat, dtype=torch.bool)
    smallest = flat.argsort(dim=1, stable=True)[:, :zeros]
    return mask.scatter_(1, smallest, False).view(scores.shape)


def keep_2_of_4(scores: Tensor) -> Tensor:
    """Return the best 2:4 mask: keep two of every four columns.

    The mask has the largest sum of scores; among equal scores the first ones are pruned.

    Shape:
        scores: (..., columns), columns a multiple of 4; returns the same

    Raises:
        ConfigError: the number of columns is not a multiple of 4.

    Source: m4n2_1d of Nvidia's apex (ASP), which BMCook uses.
    """
    columns = scores.shape[-1]
    if columns % _GROUP:
        raise ConfigError(_pattern_mismatch("rows", columns))
    return keep_largest(scores.reshape(-1, _GROUP), 2, by_row=True).view(scores.shape)


def keep_2_of_4_both_ways(scores: Tensor, *, exact: bool = True) -> Tensor:
    """Return a mask that keeps at most two of four weights in every group along both dims.

    The matrix and its transpose are both 2:4, so the products of the forward and the backward pass
    can be sparse.

    Args:
        scores: scores of at least 0.
        exact: select the best of the 90 masks of 4 x 4 with two ones in every row and column;
            otherwise select greedily by decreasing score, which may keep fewer than eight weights.

    Shape:
        scores: (rows, columns), multiples of 4; returns the same

    Raises:
        ConfigError: rows or columns are not a multiple of 4.

    Source: m4n2_2d_best and m4n2_2d_greedy of Nvidia's apex (ASP); BMCook uses the second.
    """
    rows, columns = scores.shape
    for name, size in (("columns", rows), ("rows", columns)):
        if size % _GROUP:
            raise ConfigError(_pattern_mismatch(name, size))
    blocks = scores.view(rows // 4, 4, columns // 4, 4).transpose(1, 2).reshape(-1, 16)
    find = _best_of_90 if exact else _first_that_fit
    mask = torch.cat([find(part) for part in blocks.split(_BLOCKS_AT_ONCE)])
    return mask.view(rows // 4, columns // 4, 4, 4).transpose(1, 2).reshape(rows, columns)


def _pattern_mismatch(what: str, size: int) -> str:
    low, high = size // _GROUP * _GROUP, -(-size // _GROUP) * _GROUP
    near = f"{low} or {high}" if low else f"{high}"
    return (
        f"2:4 sparsity needs {what} whose number of weights is a multiple of 4, not {size} "
        f"(nearest: {near}). Exclude this matrix from `where`."
    )


@cache
def transposable_patterns() -> tuple[tuple[int, ...], ...]:
    """Return the 90 masks of 4 x 4 with two ones in every row and column."""
    rows = [tuple(int(i in pair) for i in range(4)) for pair in combinations(range(4), 2)]
    patterns = []
    for four in product(rows, repeat=4):
        if all(sum(column) == 2 for column in zip(*four, strict=True)):
            patterns.append(tuple(entry for row in four for entry in row))
    return tuple(patterns)


def _best_of_90(blocks: Tensor) -> Tensor:
    """Return the mask with the largest sum of scores for every 4 x 4 block, (blocks, 16).

    Candidates are the 90 masks of `transposable_patterns`.
    """
    patterns = torch.tensor(transposable_patterns(), dtype=torch.float64, device=blocks.device)
    best = (blocks.double() @ patterns.t()).argmax(1)
    return patterns.bool()[best]


def _first_that_fit(blocks: Tensor) -> Tensor:
    """Return a mask for every 4 x 4 block, (blocks, 16), selected greedily by score."""
    count = blocks.shape[0]
    each = torch.arange(count, device=blocks.device)
    order = blocks.argsort(dim=1, descending=True, stable=True)
    in_rows = torch.zeros(count, 4, dtype=torch.int8, device=blocks.device)
    in_columns, mask = in_rows.clone(), torch.zeros_like(blocks, dtype=torch.bool)
    for position in order.unbind(1):
        row, column = position // 4, position % 4
        fits = (in_rows[each, row] < 2) & (in_columns[each, column] < 2)
        mask[each, position] = fits
        in_rows[each, row] += fits
        in_columns[each, column] += fits
    return mask


def cubic_share(step: int, begin: int, steps: int, share: float) -> float:
    """Return the sparsity at a step of the cubic schedule, which grows fast at first.

    Args:
        step: number of completed steps.
        begin: first step of the schedule.
        steps: length of the schedule in steps; if 0, the final sparsity is returned.
        share: final sparsity.

    Source: Zhu and Gupta, "To prune, or not to prune" (2017), equation 1, with initial sparsity 0.
    """
    if step < begin:
        return 0.0
    done = 1.0 if steps == 0 else min(1.0, (step - begin) / steps)
    return share * (1.0 - (1.0 - done) ** 3)

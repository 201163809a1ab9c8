"""Sorts the lines of a PDF page into reading order.

Most files draw lines in reading order, and that order is kept. Lines are sorted by position if the
drawing order repeatedly jumps up the page, or if the file contains two columns of prose row by row,
as from OCR programs. The page is then cut at its widest gaps, between columns first, then between
blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

__all__ = ["LineBox", "order_lines"]

_LOOK_BACK = 8  # previous lines searched for one in the same column
_UPWARD = 0.1  # maximum share of lines above the previous line of their column
_HEAD_GAP = 1.5  # minimum gap to a header or footer, as a multiple of the usual gap
_GUTTER = 0.8  # minimum gap between columns in line heights; gaps between words are narrower


_ROWS = 4  # minimum rows of two columns
_FULL = 0.6  # minimum share of the column width that prose lines fill; table cells are shorter
_PROSE = 18  # minimum mean length of prose lines, in characters


class LineBox(NamedTuple):
    """A line and its bounding box; `bottom` is less than `top`, as PDF's y axis points up."""

    text: str
    left: float
    bottom: float
    right: float
    top: float


def order_lines(lines: Sequence[LineBox]) -> list[LineBox]:
    """Return the lines in reading order: in file order if plausible, else sorted by position."""
    upward = sum(_goes_up(lines, at) for at in range(1, len(lines)))
    if upward > max(2, _UPWARD * len(lines)) or _is_drawn_by_rows(lines):
        return _cut_page(list(lines))
    return list(lines)


def _is_drawn_by_rows(lines: Sequence[LineBox]) -> bool:
    """Return True if the lines of two columns alternate in the file: left, right, left, right.

    A table has the same order, but its cells are short, or do not reach the end of their column.
    """
    pairs = [
        (first, other)
        for first, other in pairwise(lines)
        if other.left > first.right and _share_row(first, other)
    ]
    if len(pairs) < _ROWS or 3 * len(pairs) < len(lines):
        return False
    sides = [first for first, _ in pairs], [other for _, other in pairs]
    if max(line.right for line in sides[0]) > min(line.left for line in sides[1]):
        return False
    return all(map(_is_prose, sides))


def _share_row(first: LineBox, second: LineBox) -> bool:
    common = min(first.top, second.top) - max(first.bottom, second.bottom)
    return common > 0.5 * min(first.top - first.bottom, second.top - second.bottom)


def _is_prose(column: Sequence[LineBox]) -> bool:
    left, right = min(line.left for line in column), max(line.right for line in column)
    full = sum(line.right - line.left >= 0.75 * (right - left) for line in column)
    letters = sum(len(line.text) for line in column)
    return full >= _FULL * len(column) and letters >= _PROSE * len(column)


def _goes_up(lines: Sequence[LineBox], at: int) -> bool:
    """Return True if a line is above the previous line of its column."""
    line = lines[at]
    for before in reversed(lines[max(0, at - _LOOK_BACK) : at]):
        if _share_column(before, line):
            return line.bottom >= before.top - 0.1 * (before.top - before.bottom)
    return False


def _share_column(first: LineBox, second: LineBox) -> bool:
    common = min(first.right, second.right) - max(first.left, second.left)
    return common > 0.5 * min(first.right - first.left, second.right - second.left)


def _cut_page(lines: list[LineBox]) -> list[LineBox]:
    """Sort lines column by column, and the blocks of a column from top to bottom.

    A stack is used instead of recursion, as a page may have thousands of lines.
    """
    ordered: list[LineBox] = []
    waiting = [lines]
    while waiting:
        block = waiting.pop()
        height = sorted(line.top - line.bottom for line in block)[len(block) // 2]
        wide, x = max(_find_gaps([(line.left, line.right) for line in block]))
        rows = _find_gaps([(line.bottom, line.top) for line in block])
        deep, y = max(rows)
        below, above = [b for b in block if b.bottom < y], [b for b in block if b.bottom >= y]
        usual = sorted(rows)[len(rows) // 2][0]
        is_head = min(len(below), len(above)) == 1 and deep > _HEAD_GAP * usual
        if wide > _GUTTER * height and _is_gutter(block, x) and not is_head:
            waiting += [[b for b in block if b.left >= x], [b for b in block if b.left < x]]
        elif deep > 0:
            waiting += [below, above]
        else:
            ordered += sorted(block, key=lambda line: (-line.top, line.left))
    return ordered


def _is_gutter(block: list[LineBox], x: float) -> bool:
    """Return True if a gap lies between two columns, that is, has several lines on both sides."""
    return min(sum(b.left < x for b in block), sum(b.left >= x for b in block)) > 1


def _find_gaps(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return (width, end) of each gap between intervals; [(0, 0)] if there is no gap."""
    gaps, reached = [], None
    for begin, end in sorted(spans):
        if reached is not None and begin > reached:
            gaps.append((begin - reached, begin))
        reached = end if reached is None else max(reached, end)
    return gaps or [(0.0, 0.0)]

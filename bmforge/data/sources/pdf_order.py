"""Lines of a page in reading order, where a PDF draws them in another one.

Most PDF are drawn as they are read. Where lines go up the page again and again, places decide: the
page is cut at its widest gaps, between columns first, then between blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["PlacedLine", "order_lines"]

_LOOK_BACK = 8  # lines, for one in the same column
_UPWARD = 0.1  # of a page's lines may stand above the one before, in its column
_HEAD_GAP = 1.5  # of the usual gap between rows: so far off, a single line is a head or a foot
_GUTTER = 0.8  # of a line's height: no gap between words is so wide for the whole page


class PlacedLine(NamedTuple):
    """A line and where it stands; `bottom` is below `top`, as PDF counts from the foot."""

    text: str
    left: float
    bottom: float
    right: float
    top: float


def order_lines(lines: Sequence[PlacedLine]) -> list[PlacedLine]:
    """Return the lines as drawn, or by their places if they cannot be meant to be read so."""
    upward = sum(_goes_up(lines, at) for at in range(1, len(lines)))
    return list(lines) if upward <= max(2, _UPWARD * len(lines)) else _cut_page(list(lines))


def _goes_up(lines: Sequence[PlacedLine], at: int) -> bool:
    """Tell whether a line stands above the one that was drawn before it in its column."""
    line = lines[at]
    for before in reversed(lines[max(0, at - _LOOK_BACK) : at]):
        if _share_column(before, line):
            return line.bottom >= before.top - 0.1 * (before.top - before.bottom)
    return False


def _share_column(first: PlacedLine, second: PlacedLine) -> bool:
    common = min(first.right, second.right) - max(first.left, second.left)
    return common > 0.5 * min(first.right - first.left, second.right - second.left)


def _cut_page(lines: list[PlacedLine]) -> list[PlacedLine]:
    """Return lines column by column, and blocks from the top down.

    A stack takes the place of recursion, as a page may have thousands of lines.
    """
    found: list[PlacedLine] = []
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
            found += sorted(block, key=lambda line: (-line.top, line.left))
    return found


def _is_gutter(block: list[PlacedLine], x: float) -> bool:
    """Tell two columns from the cells of one row: both sides have lines of their own height."""
    return min(sum(b.left < x for b in block), sum(b.left >= x for b in block)) > 1


def _find_gaps(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return how wide each gap between spans is, and where it ends; (0, 0) if there is none."""
    found, reached = [], None
    for begin, end in sorted(spans):
        if reached is not None and begin > reached:
            found.append((begin - reached, begin))
        reached = end if reached is None else max(reached, end)
    return found or [(0.0, 0.0)]

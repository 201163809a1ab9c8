"""Lines of a PDF in reading order, whatever order they are drawn in."""

from __future__ import annotations

import random

from bmforge.data.sources.pdf import join_pages
from bmforge.data.sources.pdf_order import PlacedLine, order_lines


def two_columns() -> list[PlacedLine]:
    """Return a head, two columns of ten lines and a page number, as they are read."""
    lines = [PlacedLine("head", 200, 780, 260, 790)]
    for column in range(2):
        for row in range(10):
            left, top = 50 + 250 * column, 750 - 20 * row
            lines.append(PlacedLine(f"{column} {row}", left, top - 12, left + 180 + row, top))
    return [*lines, PlacedLine("7", 290, 30, 296, 40)]


def test_shuffled_lines_go_by_their_places() -> None:
    lines = two_columns()
    for seed in range(5):
        drawn = random.Random(seed).sample(lines, len(lines))
        assert order_lines(drawn) == lines


def test_lines_drawn_in_order_stay_as_they_are() -> None:
    lines = two_columns()
    across = [line for row in range(10) for line in (lines[1 + row], lines[11 + row])]  # a table
    for drawn in (lines, [*lines[1:], lines[0]], across, lines[:1], []):
        assert order_lines(drawn) == drawn


def test_hyphens_before_a_name_or_a_number_stay() -> None:
    pages = ["a dra\ufffematic Anglo\x02Saxon nine\ufffe100 unex\ufffe", "pected end"]
    assert join_pages(pages) == "a dramatic Anglo-\nSaxon nine-\n100 unexpected end"

"""Lines of a PDF in reading order, whatever order they are drawn in."""

from __future__ import annotations

import random

import pytest

from bmforge.data.sources.files import read_documents
from bmforge.data.sources.pdf import join_pages
from bmforge.data.sources.pdf_order import LineBox, order_lines


def two_columns() -> list[LineBox]:
    """Return a head, two columns of ten lines and a page number, as they are read."""
    lines = [LineBox("head", 200, 780, 260, 790)]
    for column in range(2):
        for row in range(10):
            left, top = 50 + 250 * column, 750 - 20 * row
            lines.append(LineBox(f"{column} {row}", left, top - 12, left + 180 + row, top))
    return [*lines, LineBox("7", 290, 30, 296, 40)]


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


LEFT = (
    "The ferry to the northern|leaves at six in the morning|most of the people who take|"
    "work in the small harbour|"
    "side. They have known each|for years, and they like|"
    "When the fog is thick the|waits, and nobody complains"
)
RIGHT = (
    "Soil temperature determines|quickly seeds sprout in the|Beans need about twelve|"
    "while peas are content with|"
    "A gardener who measures it|morning will rarely be sorry|by what comes of the ground|"
    "in the weeks that follow it"
)
CELLS = "ferry|bus|train|tram|a boat that is long|car|van|bike"


def write_pdf(placed: list[tuple[int, int, str]]) -> bytes:
    """Write one page with lines of text in Helvetica."""
    shown = "".join(f"BT /F1 11 Tf {x} {y} Td ({text}) Tj ET\n" for x, y, text in placed)
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R "
        "/Resources << /Font << /F1 5 0 R >> >> >>",
        f"<< /Length {len(shown)} >>\nstream\n{shown}endstream",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    parts, places = ["%PDF-1.4\n"], []
    for number, content in enumerate(objects, 1):
        places.append(sum(map(len, parts)))
        parts.append(f"{number} 0 obj\n{content}\nendobj\n")
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    parts.append(f"xref\n0 6\n0000000000 65535 f \n{table}trailer\n<< /Size 6 /Root 1 0 R >>\n")
    parts.append(f"startxref\n{sum(map(len, parts[:-1]))}\n%%EOF\n")
    return "".join(parts).encode()


@pytest.mark.parametrize("right", [320, 280, 400])
@pytest.mark.parametrize("by_rows", [True, False])
def test_columns_of_prose_are_read_one_after_the_other(tmp_path, right, by_rows) -> None:
    pytest.importorskip("pypdfium2")
    columns = [(60, LEFT.split("|")), (right, RIGHT.split("|"))]
    lines = [(x, 740 - 16 * n, text) for x, texts in columns for n, text in enumerate(texts)]
    drawn = [line for n in range(8) for line in (lines[n], lines[8 + n])] if by_rows else lines
    (tmp_path / "a.pdf").write_bytes(write_pdf(drawn))
    (found,) = read_documents(tmp_path / "a.pdf")
    assert found.text.split() == f"{LEFT}|{RIGHT}".replace("|", " ").split()


def test_rows_of_a_table_stay_rows(tmp_path) -> None:
    pytest.importorskip("pypdfium2")
    names, cells = CELLS.split("|"), [str(100 + n) for n in range(8)]
    drawn = [
        place
        for n in range(8)
        for place in ((60, 740 - 16 * n, names[n]), (320, 740 - 16 * n, cells[n]))
    ]
    (tmp_path / "a.pdf").write_bytes(write_pdf(drawn))
    (found,) = read_documents(tmp_path / "a.pdf")
    assert found.text.split() == [
        word for name, cell in zip(names, cells, strict=True) for word in (*name.split(), cell)
    ]

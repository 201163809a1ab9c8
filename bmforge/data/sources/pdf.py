"""Reads PDF: text in reading order, with hyphenated words joined and page headers removed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any, BinaryIO

from bmforge.data.clean.drop import Drop
from bmforge.data.sources.document import Document
from bmforge.data.sources.pdf_order import LineBox, order_lines
from bmforge.data.sources.record import ReadOptions, Record, Where
from bmforge.errors import DataError, MissingDependencyError

__all__ = ["join_pages", "parse_pdf", "read_pdf"]

_LARGEST_BYTES = 1 << 28
# Maximum characters: a multiple of the file size, as many pages may refer to the same content.
_HIGHEST_RATIO = 10
_LARGE_TEXT = 1 << 22
_LEAST_CHARACTERS = 20  # mean characters per page; scans have almost none
_LEAST_PAGES = 3  # pages on which a line must recur to be a running header
_EDGE_LINES = 2
_NUMBERS = re.compile(r"[0-9]{1,6}")
_TORN = re.compile("(\\w)[-\u00ad\u2010]\n(?=[a-zà-öø-ÿß])")
_SIGN = re.compile("[\ufffe\x02]\n?")  # pdfium's character for a hyphen at a line end
_UNPLACED = " \ufffe\x02"
_WORD = re.compile("[^ \ufffe\x02]+")
_COLUMN_GAP = 1.5  # in line heights
_LINE = re.compile("[^\r\n\ufffe\x02]*[\ufffe\x02]?")


def read_pdf(stream: BinaryIO, where: Where, options: ReadOptions) -> Iterator[Record]:
    """Yield the whole file as one record."""
    raw = stream.read(_LARGEST_BYTES + 1)
    yield Record(where.whole(), len(raw), partial(parse_pdf, raw, where))


def parse_pdf(raw: bytes, where: Where) -> Document | Drop:
    """Parse the text of a PDF; return a `Drop` for scans without text and for encrypted files.

    Raises:
        DataError: the file is damaged.
        MissingDependencyError: pypdfium2 is not installed.
    """
    if len(raw) > _LARGEST_BYTES:
        return Drop("pdf_too_large", len(raw), _LARGEST_BYTES, str(where))
    try:
        import pypdfium2
    except ImportError as error:
        raise MissingDependencyError("pypdfium2", "data", f"reading {where}") from error
    try:
        with pypdfium2.PdfDocument(raw) as file:
            pages: list[str] = []
            left = max(_LARGE_TEXT, _HIGHEST_RATIO * len(raw))
            for page in file:
                text = page.get_textpage()
                left -= text.count_chars()
                if left >= 0:
                    pages.append(_read_page(text))
                text.close()
                page.close()
                if left < 0:
                    bound = max(_LARGE_TEXT, _HIGHEST_RATIO * len(raw))
                    return Drop("pdf_text_too_large", bound - left, bound, str(where))
    except pypdfium2.PdfiumError as error:
        if "password" in str(error).lower():
            return Drop("pdf_encrypted", None, None, str(where))
        raise DataError(
            f"file {str(where)!r} is damaged, or is not a PDF ({error}). Remove it from the input."
        ) from error
    count = sum(len("".join(page.split())) for page in pages)
    if count < _LEAST_CHARACTERS * len(pages):
        return Drop("pdf_scan", count / max(len(pages), 1), _LEAST_CHARACTERS, str(where))
    return Document(join_pages(pages), where.source, where.whole())


def _read_page(page: Any) -> str:
    """Return the text of a pdfium page, with lines in reading order."""
    drawn = page.get_text_range()
    if len(drawn) == page.count_chars():  # otherwise the positions do not match the text
        lines = [
            placed
            for line in _LINE.finditer(drawn)
            if line[0].strip(_UNPLACED)
            for placed in _place(page, line.start(), line[0])
        ]
        ordered = order_lines(lines)
        if ordered != lines:
            return "\n".join(line.text for line in ordered)
    return str(page.get_text_bounded().replace("\r\n", "\n"))


def _place(page: Any, begin: int, text: str) -> Iterator[LineBox]:
    """Yield a line with its bounding box; a line that spans two columns is split.

    `begin` is the index of the first character of `text` among the characters of the page.
    """
    words = list(_WORD.finditer(text))
    boxes = [
        [page.get_charbox(begin + at, loose=True) for at in (word.start(), word.end() - 1)]
        for word in words
    ]
    start = 0
    for at in range(1, len(words) + 1):
        height = boxes[start][0][3] - boxes[start][0][1]
        if at < len(words) and boxes[at][0][0] - boxes[at - 1][1][2] < _COLUMN_GAP * height:
            continue
        (left, bottom, _, top), (_, low, right, high) = boxes[start][0], boxes[at - 1][1]
        end = words[at].start() if at < len(words) else len(text)
        line_text = text[words[start].start() : end].rstrip(" ")
        yield LineBox(line_text, left, min(bottom, low), right, max(top, high))
        start = at


def join_pages(pages: list[str]) -> str:
    """Join the pages into one string, without running headers and footers."""
    texts = [_SIGN.sub("-\n", page).strip() for page in pages]
    split = [[line.rstrip() for line in page.split("\n")] for page in texts]
    seen: Counter[tuple[bool, str]] = Counter()
    for page, lines in enumerate(split):
        seen.update({shape for at in range(len(lines)) for shape in _shapes(lines, at, page)})
    running = {shape for shape, count in seen.items() if 2 * count > len(pages) >= _LEAST_PAGES}
    kept_pages = []
    for page, lines in enumerate(split):
        left = [
            line
            for at, line in enumerate(lines)
            if not (_is_edge(lines, at) and line.strip().isdecimal())
            and running.isdisjoint(_shapes(lines, at, page))
        ]
        kept_pages.append("\n".join(left))
    return _TORN.sub(r"\1", "\n".join(kept_pages))


def _shapes(lines: list[str], at: int, page: int) -> set[tuple[bool, str]]:
    """Return strings that are equal for a running header or footer on different pages.

    They are the line itself, and the line with one number replaced by its difference from the page
    number. For lines elsewhere on the page there are no such strings.
    """
    line, is_foot = lines[at].strip(), at >= len(lines) - _EDGE_LINES
    if not line or not _is_edge(lines, at):
        return set()
    shapes = {(is_foot, line)}
    for number in _NUMBERS.finditer(line):
        count = int(number[0]) - page
        shapes.add((is_foot, f"{line[: number.start()]}#{count}{line[number.end() :]}"))
    return shapes


def _is_edge(lines: list[str], at: int) -> bool:
    return at < _EDGE_LINES or at >= len(lines) - _EDGE_LINES

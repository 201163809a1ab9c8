"""Reads PDF: text in reading order, with hyphenated words joined and page headers removed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import BinaryIO

from bmforge.data.clean.drop import Drop
from bmforge.data.sources.document import Document
from bmforge.data.sources.pdf_process import (
    PdfLimitError,
    PdfRefusedError,
    PdfTextError,
    shared_pdf_process,
)
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


def read_pdf(stream: BinaryIO, where: Where, options: ReadOptions) -> Iterator[Record]:
    """Yield the whole file as one record."""
    raw = stream.read(_LARGEST_BYTES + 1)
    yield Record(where.whole(), len(raw), partial(parse_pdf, raw, where))


def parse_pdf(raw: bytes, where: Where) -> Document | Drop:
    """Parse the text of a PDF.

    Returns:
        The document, or a `Drop` for a scan without text, an encrypted file, or a file that needs
        too much memory or CPU time.

    Raises:
        DataError: the file is damaged.
        MissingDependencyError: pypdfium2 is not installed.
    """
    if len(raw) > _LARGEST_BYTES:
        return Drop("pdf_too_large", len(raw), _LARGEST_BYTES, str(where))
    if find_spec("pypdfium2") is None:
        raise MissingDependencyError("pypdfium2", "data", f"reading {where}")
    most_characters = max(_LARGE_TEXT, _HIGHEST_RATIO * len(raw))
    try:
        pages = shared_pdf_process().read_pages(raw, most_characters)
    except PdfTextError as error:
        return Drop("pdf_text_too_large", error.args[0], most_characters, str(where))
    except PdfLimitError as error:
        return Drop("pdf_too_complex", error.args[0], None, str(where))
    except PdfRefusedError as error:
        if "password" in str(error).lower():
            return Drop("pdf_encrypted", None, None, str(where))
        raise DataError(
            f"file {str(where)!r} is damaged, or is not a PDF ({error}). Remove it from the input."
        ) from error
    count = sum(len("".join(page.split())) for page in pages)
    if count < _LEAST_CHARACTERS * len(pages):
        return Drop("pdf_scan", count / max(len(pages), 1), _LEAST_CHARACTERS, str(where))
    return Document(join_pages(pages), where.source, where.whole())


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

"""Reads office files (zip archives of XML): .docx, .pptx, .xlsx, .odt, .ods, .odp."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import BinaryIO

from bmforge.data.clean.drop import Drop
from bmforge.data.sources.archives import UNREADABLE, read_zip_member
from bmforge.data.sources.document import Document
from bmforge.data.sources.record import ReadOptions, Record, Where
from bmforge.data.sources.xml_text import Attributes, TextRules, read_xml_text, walk_xml
from bmforge.errors import DataError

__all__ = [
    "ZipParts",
    "office_kind",
    "parse_zip_document",
    "read_docx",
    "read_open_document",
    "read_pptx",
    "read_xlsx",
]

LARGEST_BYTES = 1 << 28  # maximum size of a file, and of all files read from the archive
# Limits on the decompressed files: XML of short paragraphs takes ten times its size in memory.
_LARGE_XML_BYTES = 1 << 25
_HIGHEST_RATIO = 40
_MARKERS = {
    "docx": "word/document.xml",
    "pptx": "ppt/presentation.xml",
    "xlsx": "xl/workbook.xml",
    "epub": "META-INF/container.xml",
}
_OPEN_DOCUMENT = "application/vnd.oasis.opendocument."
_NUMBER = re.compile(r"\d+")
# Paragraph settings (their tabs are tab stops), copies of text for old programs, and non-text.
_WORD_HIDDEN = frozenset(("pPr", "Fallback", "instrText", "delText"))
_WORD_SPACES = {"tab": "\t", "br": "\n", "cr": "\n"}
_SLIDE = TextRules(frozenset(("t",)), before={"br": "\n"}, after={"p": "\n", "tc": "\t"})
_OPEN = TextRules(
    frozenset(("p", "h")),
    before={"tab": "\t", "line-break": "\n", "s": " "},
    after={"p": "\n", "h": "\n", "table-row": "\n"},
    hidden=frozenset(("tracked-changes", "annotation", "note-citation")),
)
Find = Callable[["ZipParts"], str]


class ZipParts:
    """Reads the files inside a zip archive, with a limit on their total size.

    Attributes:
        names: names of all files.
        damaged: number of files that could not be read.
    """

    def __init__(self, archive: zipfile.ZipFile, most_bytes: int) -> None:
        self._archive, self._left_bytes = archive, most_bytes
        self.names = archive.namelist()
        self.damaged = 0

    def read(self, name: str) -> bytes:
        """Return the bytes of one file.

        Raises:
            KeyError: the file does not exist.
            ValueError: the files are too large.
        """
        self.charge(0)  # a negative limit would read the whole part
        raw = read_zip_member(self._archive, self._archive.getinfo(name), self._left_bytes + 1)
        self.charge(len(raw))
        return raw

    def charge(self, size: int) -> None:
        """Subtract a size in bytes or characters from the limit.

        Raises:
            ValueError: the limit is exceeded.
        """
        self._left_bytes -= size
        if self._left_bytes < 0:
            raise ValueError("the files in the document are too large after decompression")


def office_kind(archive: zipfile.ZipFile) -> str:
    """Return the document format of a zip archive; "" for any other archive."""
    names = set(archive.namelist())
    if "mimetype" in names:
        try:
            with archive.open("mimetype") as part:
                kind = part.read(100).decode("ascii", "replace").strip()
        except UNREADABLE:
            kind = ""
        if kind.startswith(_OPEN_DOCUMENT):
            return "odf"
    return next((kind for kind, marker in _MARKERS.items() if marker in names), "")


def read_docx(stream: BinaryIO, where: Where, options: ReadOptions) -> Iterator[Record]:
    """Yield the whole file as one record: its paragraphs, and the rows of its tables."""
    yield from _read(stream, where, _docx_text)


def read_pptx(stream: BinaryIO, where: Where, options: ReadOptions) -> Iterator[Record]:
    """Yield the whole file as one record: the text of its slides, in order."""
    yield from _read(stream, where, _pptx_text)


def read_xlsx(stream: BinaryIO, where: Where, options: ReadOptions) -> Iterator[Record]:
    """Yield the whole file as one record: the rows of its sheets, with tabs between cells."""
    yield from _read(stream, where, _xlsx_text)


def read_open_document(stream: BinaryIO, where: Where, options: ReadOptions) -> Iterator[Record]:
    """Yield the whole file as one record: the paragraphs of its content."""
    yield from _read(stream, where, lambda parts: read_xml_text(parts.read("content.xml"), _OPEN))


def _read(stream: BinaryIO, where: Where, find: Find) -> Iterator[Record]:
    raw = stream.read(LARGEST_BYTES + 1)
    yield Record(where.whole(), len(raw), partial(parse_zip_document, raw, where, find))


def parse_zip_document(raw: bytes, where: Where, find: Find) -> Document | Drop:
    """Parse a zip archive into a document, whose text `find` extracts from the archive's files.

    Raises:
        DataError: the archive or a required file is damaged.
    """
    if len(raw) > LARGEST_BYTES:
        return Drop("book_too_large", len(raw), LARGEST_BYTES, str(where))
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            allowed = max(_LARGE_XML_BYTES, _HIGHEST_RATIO * len(raw))
            parts = ZipParts(archive, min(LARGEST_BYTES, where.budget_bytes, allowed))
            text = find(parts)
    except (*UNREADABLE, DataError, KeyError) as error:
        reason = str(error).rstrip(".")
        raise DataError(
            f"file {str(where)!r} cannot be read ({reason}). Remove it from the input."
        ) from error
    if not text.strip() and parts.damaged:
        raise DataError(
            f"file {str(where)!r} has no readable text, because {parts.damaged} of the files in it "
            "are damaged. Remove it from the input."
        )
    if not text.strip():
        return Drop("no_main_text", 0, 1, str(where))
    scores = {"damaged_parts": parts.damaged} if parts.damaged else {}
    return Document(text, where.source, where.whole(), scores=scores)


def _docx_text(parts: ZipParts) -> str:
    lines = _DocxLines()
    walk_xml(parts.read("word/document.xml"), lines.begin, lines.end, lines.text)
    return "\n".join("".join(line).rstrip(" \t") for line in lines.lines)


class _DocxLines:
    """Collects the paragraphs of a .docx file, and its table rows with tabs between cells.

    A paragraph may contain a text box with its own paragraphs, which follow it.
    """

    def __init__(self) -> None:
        self.lines: list[list[str]] = []
        self._open: list[list[str]] = []
        self._rows = self._hidden = 0
        self._is_text = False

    def begin(self, name: str, _: Attributes) -> None:
        """Handle the start of an element: open a paragraph or table row."""
        self._hidden += name in _WORD_HIDDEN
        if self._hidden:
            return
        if name == "tr":
            self._rows += 1
        if (name == "tr" and self._rows == 1) or (name == "p" and not self._rows):
            self._open.append([])
            self.lines.append(self._open[-1])
        elif name in _WORD_SPACES:
            self.text(_WORD_SPACES[name], is_space=True)
        self._is_text = name == "t"

    def end(self, name: str) -> None:
        """Handle the end of an element: close a paragraph, cell or row."""
        if self._hidden:
            self._hidden -= name in _WORD_HIDDEN
            return
        self._is_text = False
        if name == "tc":
            self.text("\t", is_space=True)
        elif name == "p" and self._rows:
            self.text(" ", is_space=True)
        elif name == "p" or (name == "tr" and self._rows == 1):
            self._open.pop()
        if name == "tr":
            self._rows -= 1

    def text(self, data: str, is_space: bool = False) -> None:
        """Add text to the innermost open paragraph or row."""
        if self._open and not self._hidden and (self._is_text or is_space):
            if data == "\t" and self._open[-1][-1:] == [" "]:
                self._open[-1].pop()
            self._open[-1].append(data)


def _pptx_text(parts: ZipParts) -> str:
    slides = [name for name in parts.names if re.fullmatch(r"ppt/slides/slide\d+\.xml", name)]
    slides.sort(key=lambda name: int(_NUMBER.findall(name)[-1]))
    return "\n\n".join(_each_part(parts, slides, lambda raw: read_xml_text(raw, _SLIDE)))


def _each_part(parts: ZipParts, names: list[str], read: Callable[[bytes], str]) -> Iterator[str]:
    """Yield the text of each file in the archive; damaged files are counted and skipped."""
    for name in names:
        try:
            text = read(parts.read(name)).strip("\n")
        except (*UNREADABLE, DataError, KeyError):
            parts.damaged += 1
            continue
        if text.strip():
            yield text


def _xlsx_text(parts: ZipParts) -> str:
    shared = _shared_strings(parts) if "xl/sharedStrings.xml" in parts.names else []
    sheets = [name for name in parts.names if re.fullmatch(r"xl/worksheets/sheet\d+\.xml", name)]
    sheets.sort(key=lambda name: int(_NUMBER.findall(name)[-1]))
    return "\n\n".join(_each_part(parts, sheets, lambda raw: _sheet_text(raw, shared, parts)))


def _shared_strings(parts: ZipParts) -> list[str]:
    rules = TextRules(frozenset(("t",)), {}, {"si": "\0"}, frozenset(("rPh",)))
    return read_xml_text(parts.read("xl/sharedStrings.xml"), rules).split("\0")[:-1]


def _sheet_text(raw: bytes, shared: list[str], archive: ZipParts) -> str:
    """Return the rows of a spreadsheet as text, with the values of formulas.

    Each reference to a shared string counts with its length: a few bytes can refer to a long one.
    """
    parts: list[str] = []
    cell: dict[str, str] = {"type": "", "inside": ""}

    def begin(name: str, attributes: Attributes) -> None:
        if name == "c":
            cell["type"] = attributes.get("t", "")
        cell["inside"] = name if name in ("v", "t") else cell["inside"]

    def end(name: str) -> None:
        cell["inside"] = "" if name in ("v", "t") else cell["inside"]
        if name in ("c", "row"):
            parts.append("\t" if name == "c" else "\n")

    def text(data: str) -> None:
        if cell["inside"]:
            is_shared = cell["type"] == "s" and data.isdecimal() and int(data) < len(shared)
            if is_shared:
                data = shared[int(data)]
                archive.charge(len(data))
            parts.append(data)

    walk_xml(raw, begin, end, text)
    return "\n".join(line.rstrip("\t") for line in "".join(parts).split("\n")).rstrip("\n")

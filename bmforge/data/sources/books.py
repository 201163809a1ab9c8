"""Books and office texts that are zip files of XML: .epub and .docx, with the standard library."""

from __future__ import annotations

import io
import posixpath
import zipfile
from collections.abc import Iterator
from functools import partial
from typing import Any, BinaryIO
from urllib.parse import unquote
from xml.etree import ElementTree

from bmforge.data.clean.drop import Drop
from bmforge.data.sources.archives import UNREADABLE
from bmforge.data.sources.document import Document
from bmforge.data.sources.record import ReadOptions, Record, Where
from bmforge.errors import DataError

__all__ = ["read_docx", "read_epub"]

_LARGEST_BYTES = 1 << 28
_WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
# Settings of a paragraph, whose tabs are stops; and the same once more for programs that are old.
_UNREAD = {
    f"{_WORD}pPr",
    "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback",
}
_SPACES = {f"{_WORD}tab": "\t", f"{_WORD}br": "\n"}
_CONTAINER = "META-INF/container.xml"
_BLOCKS = {"p", "div", "h1", "h2", "h3", "h4", "h5", "h6", "li", "br", "tr", "blockquote", "dd"}
_UNSEEN = {"head", "script", "style"}


def read_docx(stream: BinaryIO, where: Where, options: ReadOptions) -> Iterator[Record]:
    """Yield the whole file as one entry: its paragraphs."""
    yield from _read(stream, where, _docx_text)


def read_epub(stream: BinaryIO, where: Where, options: ReadOptions) -> Iterator[Record]:
    """Yield the whole book as one entry: its chapters in the order of its spine."""
    yield from _read(stream, where, _epub_text)


def _read(stream: BinaryIO, where: Where, find: Any) -> Iterator[Record]:
    raw = stream.read(_LARGEST_BYTES + 1)
    yield Record(where.whole(), len(raw), partial(_parse, raw, where, find))


def _parse(raw: bytes, where: Where, find: Any) -> Document | Drop:
    if len(raw) > _LARGEST_BYTES:
        return Drop("book_too_large", len(raw), _LARGEST_BYTES, str(where))
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            text = find(_Parts(archive))
    except (*UNREADABLE, ElementTree.ParseError, KeyError) as error:
        raise DataError(f"file {str(where)!r} cannot be read ({error})") from error
    if not text.strip():
        return Drop("no_main_text", 0, 1, str(where))
    return Document(text, where.source, where.whole())


class _Parts:
    """The parts of a book as XML; all together they may not be too large."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive, self._left_bytes = archive, _LARGEST_BYTES

    def read(self, name: str) -> ElementTree.Element:
        with self._archive.open(name) as part:
            raw = part.read(self._left_bytes + 1)
        self._left_bytes -= len(raw)
        if self._left_bytes < 0:
            raise ValueError(f"its parts unpack to more than {_LARGEST_BYTES} bytes")
        if b"<!ENTITY" in raw:
            raise ValueError(f"{name!r} defines entities, which may grow without bound")
        return ElementTree.fromstring(raw)


def _docx_text(parts: _Parts) -> str:
    paragraphs: list[list[str]] = []
    # Each node with what the paragraph around it says: a text box has paragraphs of its own in one.
    waiting: list[tuple[ElementTree.Element, list[str]]] = [(parts.read("word/document.xml"), [])]
    while waiting:
        node, said = waiting.pop()
        if node.tag in _UNREAD:
            continue
        if node.tag == f"{_WORD}p":
            said = []
            paragraphs.append(said)
        elif node.tag == f"{_WORD}t":
            said.append(node.text or "")
        elif node.tag in _SPACES:
            said.append(_SPACES[node.tag])
        waiting.extend((child, said) for child in reversed(node))
    return "\n".join("".join(said) for said in paragraphs)


def _epub_text(parts: _Parts) -> str:
    container = parts.read(_CONTAINER).iter()
    root = next((node for node in container if _name(node) == "rootfile"), None)
    if root is None:
        raise ValueError(f"{_CONTAINER} names no book")
    path = root.attrib["full-path"]
    package = parts.read(path)
    nodes = {kind: [n for n in package.iter() if _name(n) == kind] for kind in ("item", "itemref")}
    places = {node.attrib["id"]: node.attrib["href"] for node in nodes["item"]}
    chapters = []
    for node in nodes["itemref"]:
        place = posixpath.join(posixpath.dirname(path), unquote(places[node.attrib["idref"]]))
        chapters.append(_page_text(parts.read(posixpath.normpath(place))))
    return "\n\n".join(chapter for chapter in chapters if chapter)


def _name(node: ElementTree.Element) -> str:
    return node.tag.rpartition("}")[2] if isinstance(node.tag, str) else ""


def _page_text(root: ElementTree.Element) -> str:
    """Return a page's text, a line per block."""
    said: list[str] = []
    waiting: list[tuple[ElementTree.Element, bool]] = [(root, False)]
    while waiting:
        node, is_left = waiting.pop()
        name = _name(node)
        if is_left:
            said.append("\n" if name in _BLOCKS else "")
            said.append(_spaced(node.tail or ""))
            continue
        waiting.append((node, True))
        if name in _UNSEEN:
            continue
        said.append("\n" if name in _BLOCKS else "")
        said.append(_spaced(node.text or ""))
        waiting.extend((child, False) for child in reversed(node))
    lines = (" ".join(line.split()) for line in "".join(said).split("\n"))
    return "\n".join(line for line in lines if line)


def _spaced(text: str) -> str:
    """Return text in which line ends are spaces, as a page has it."""
    return text.replace("\n", " ").replace("\r", " ")

"""Reads .epub books, chapter by chapter in the order of the spine."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from functools import partial
from typing import BinaryIO
from urllib.parse import unquote

from bmforge.data.sources.archives import UNREADABLE
from bmforge.data.sources.office import LARGEST_BYTES, ZipParts, parse_zip_document
from bmforge.data.sources.record import ReadOptions, Record, Where
from bmforge.data.sources.xml_text import Attributes, read_page_text, walk_xml
from bmforge.errors import DataError

__all__ = ["read_epub"]

_CONTAINER = "META-INF/container.xml"
_PAGES = ("application/xhtml+xml", "text/html", "application/x-dtbook+xml", "")


def read_epub(stream: BinaryIO, where: Where, options: ReadOptions) -> Iterator[Record]:
    """Yield the whole book as one record; damaged chapters are skipped."""
    raw = stream.read(LARGEST_BYTES + 1)
    yield Record(where.whole(), len(raw), partial(parse_zip_document, raw, where, _epub_text))


def _epub_text(parts: ZipParts) -> str:
    chapters = []
    for name in _spine(parts):
        try:
            chapters.append(read_page_text(parts.read(name)))
        except (*UNREADABLE, KeyError):
            parts.damaged += 1
    if parts.damaged and not any(chapters):
        raise DataError(
            "the book has no readable chapter, because the EPUB file is damaged or encrypted. "
            "Remove it from the input."
        )
    return "\n\n".join(chapter for chapter in chapters if chapter)


def _spine(parts: ZipParts) -> list[str]:
    """Return the file names of the chapters; without a usable spine, all pages sorted by name."""
    try:
        package = _find_package(parts)
        items, order = _read_package(parts.read(package))
    except (DataError, KeyError):
        return sorted(name for name in parts.names if name.endswith((".xhtml", ".html", ".htm")))
    names = []
    for id in order:
        href, kind = items.get(id, ("", "missing"))
        if kind == "missing":
            parts.damaged += 1
        elif kind in _PAGES:
            joined = posixpath.join(posixpath.dirname(package), unquote(href.partition("#")[0]))
            names.append(posixpath.normpath(joined))
    return names


def _find_package(parts: ZipParts) -> str:
    places: list[str] = []

    def begin(name: str, attributes: Attributes) -> None:
        if name == "rootfile":
            places.append(attributes.get("full-path", ""))

    walk_xml(parts.read(_CONTAINER), begin, lambda name: None, lambda data: None)
    if not places:
        raise DataError(f"the EPUB's {_CONTAINER} lists no package file. Remove it from the input.")
    return places[0]


def _read_package(raw: bytes) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Parse the package file; return a dict from item id to (path, type), and the spine's ids."""
    items: dict[str, tuple[str, str]] = {}
    order: list[str] = []

    def begin(name: str, attributes: Attributes) -> None:
        if name == "item":
            items[attributes.get("id", "")] = (
                attributes.get("href", ""),
                attributes.get("media-type", ""),
            )
        elif name == "itemref":
            order.append(attributes.get("idref", ""))

    walk_xml(raw, begin, lambda name: None, lambda data: None)
    return items, order

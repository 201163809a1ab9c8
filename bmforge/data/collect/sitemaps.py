"""Finds URLs in sitemaps (XML, text, gzip), sitemap indexes, and feeds (RSS, Atom)."""

from __future__ import annotations

import re
import zlib
from xml.etree import ElementTree

__all__ = ["find_addresses"]

_MOST = 50_000  # maximum URLs of a sitemap, by the protocol
_MOST_BYTES = 50 << 20  # maximum size of a decompressed sitemap, by the protocol
_ROOTS = ("urlset", "sitemapindex", "rss", "feed", "RDF")
_HEAD = re.compile(rb"<(?![?!])(?:\w+:)?(\w+)")
_ADDRESS = re.compile(r"https?://\S+", re.IGNORECASE)


def find_addresses(body: bytes, kind: str = "") -> list[str] | None:
    """Return the URLs in a sitemap or feed; None if the body is neither.

    An XML file that declares entities is not parsed, as entity expansion can exhaust memory.

    Args:
        body: response body.
        kind: content type; plain text with a URL on each line is a sitemap as well.

    Source: sitemaps.org/protocol.html.
    """
    if body.startswith(b"\x1f\x8b"):
        unpacked = _unpack(body)
        return None if unpacked is None else find_addresses(unpacked, "text/plain")
    root = _HEAD.search(body[:4096])
    if root is None or root[1].decode() not in _ROOTS:
        return _find_lines(body) if kind.startswith("text/plain") or not kind else None
    if b"<!ENTITY" in body or b"<!DOCTYPE" in body[:4096]:
        return []
    try:
        tree = ElementTree.fromstring(body)
    except (ElementTree.ParseError, ValueError):
        return []
    addresses = []
    for element in tree.iter():
        name, text = _name(element), (element.text or "").strip()
        if name in ("url", "sitemap"):  # its images and videos have a `loc` too
            addresses += [
                (child.text or "").strip()
                for child in element
                if _name(child) == "loc" and _space(child) == _space(element)
            ]
        elif name == "link" and text:
            addresses.append(text)
        elif name == "link" and element.get("rel", "alternate") == "alternate":
            addresses.append(element.get("href", ""))
    return [address for address in dict.fromkeys(addresses) if address][:_MOST]


def _unpack(body: bytes) -> bytes | None:
    """Decompress a gzip body; None if it is damaged or too large."""
    unpacker = zlib.decompressobj(31)
    try:
        unpacked = unpacker.decompress(body, _MOST_BYTES)
    except zlib.error:
        return None
    return unpacked if unpacker.eof else None


def _find_lines(body: bytes) -> list[str] | None:
    """Return the URLs of a plain-text sitemap (one per line); None if other text is present."""
    lines = body.decode("utf-8-sig", "replace").split()
    if not lines or not all(_ADDRESS.fullmatch(line) for line in lines):
        return None
    return list(dict.fromkeys(lines))[:_MOST]


def _name(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2] if isinstance(element.tag, str) else ""


def _space(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[0]

"""Addresses in sitemaps, their indexes, and feeds (RSS, Atom)."""

from __future__ import annotations

import re
from xml.etree import ElementTree

__all__ = ["find_addresses"]

_MOST = 50_000  # of a sitemap, by its protocol
_ROOTS = ("urlset", "sitemapindex", "rss", "feed", "RDF")
_HEAD = re.compile(rb"<(?![?!])(?:\w+:)?(\w+)")


def find_addresses(body: bytes) -> list[str] | None:
    """Return the addresses in a sitemap or feed, None where the text is none.

    One that declares entities is not parsed: it can be a bomb.
    """
    root = _HEAD.search(body[:4096])
    if root is None or root[1].decode() not in _ROOTS:
        return None
    if b"<!ENTITY" in body or b"<!DOCTYPE" in body[:4096]:
        return []
    try:
        tree = ElementTree.fromstring(body)
    except (ElementTree.ParseError, ValueError):
        return []
    found = []
    for element in tree.iter():
        name = element.tag.rpartition("}")[2] if isinstance(element.tag, str) else ""
        text = (element.text or "").strip()
        if name == "loc" or (name == "link" and text):
            found.append(text)
        elif name == "link" and element.get("rel", "alternate") == "alternate":
            found.append(element.get("href", ""))
    return [address for address in dict.fromkeys(found) if address][:_MOST]

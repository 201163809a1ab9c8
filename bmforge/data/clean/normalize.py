"""Normalizes texts so that they can be compared, and drops exact duplicates."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b

from bmforge.data.sources.document import Document

__all__ = [
    "CleanCount",
    "drop_duplicates",
    "normalize_text",
    "normalize_documents",
    "text_digest",
]

_NEWLINES = re.compile("\r\n|[\r\v\f\x1c-\x1e\x85\u2028\u2029]")
_CONTROLS = re.compile("[\x00-\x08\x0e-\x1b\x1f\x7f-\x84\x86-\x9f\ufeff]")
_BLANK_LINES = re.compile("\n{3,}")
_SPACES = " \t\u00a0\u3000"


@dataclass
class CleanCount:
    """Counts of the documents dropped during cleaning: empty texts and exact duplicates."""

    empty: int = 0
    duplicates: int = 0


def normalize_text(text: str) -> str:
    r"""Normalize a text: NFC, ``\n`` line ends, no control characters, no trailing spaces.

    Consecutive blank lines become one; blank lines at the beginning and end are removed;
    indentation is kept. Normalizing a normalized text does not change it.
    """
    text = _CONTROLS.sub("", _NEWLINES.sub("\n", text))
    text = unicodedata.normalize("NFC", text)
    text = "\n".join(line.rstrip(_SPACES) for line in text.split("\n"))
    return _BLANK_LINES.sub("\n\n", text).strip("\n")


def normalize_documents(
    documents: Iterable[Document], count: CleanCount | None = None
) -> Iterator[Document]:
    """Yield the documents with normalized text; empty documents are counted and dropped."""
    count = CleanCount() if count is None else count
    for document in documents:
        text = normalize_text(document.text)
        if text:
            yield replace(document, text=text)
        else:
            count.empty += 1


def text_digest(text: str) -> bytes:
    """Return the 128-bit BLAKE2b digest of the text's UTF-8 bytes."""
    return blake2b(text.encode(), digest_size=16).digest()


def drop_duplicates(
    documents: Iterable[Document], count: CleanCount | None = None
) -> Iterator[Document]:
    """Yield each document whose text did not occur before; texts must be normalized.

    Memory: one 16-byte digest per distinct document (about 100 bytes with Python's set).
    """
    count = CleanCount() if count is None else count
    seen: set[bytes] = set()
    for document in documents:
        digest = text_digest(document.text)
        if digest in seen:
            count.duplicates += 1
        else:
            seen.add(digest)
            yield document

"""Finds exact duplicates of documents and paragraphs, independent of the document order."""

from __future__ import annotations

import re
import struct
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bmforge.data.dedup.clusters import place_source
from bmforge.data.dedup.files import RepeatedItems
from bmforge.data.dedup.minhash import DedupConfig
from bmforge.data.dedup.sort import SortedRows
from bmforge.data.dedup.tokens import digest_string
from bmforge.data.sources.document import Document

__all__ = [
    "cut_paragraphs",
    "find_copies",
    "find_repeated_numbers",
    "find_repeated_paragraphs",
    "locate_paragraphs",
]

_BREAK = re.compile("(\n{2,})")
_SORT_BYTES = 1 << 25
_BATCH = 1 << 12
# Hash of a paragraph, rank of its document (as in `rank_documents`), and position.
_FIELDS = "high", "low", "source", "size", "text", "id_high", "id_low", "position"
_PARAGRAPH = np.dtype(
    [(name, "<i8" if name in ("source", "size", "position") else "<u8") for name in _FIELDS]
)


def find_copies(documents: Iterable[Document], config: DedupConfig | None = None) -> dict[str, str]:
    """Return a dict from the id of each exact duplicate to the id of the document to keep.

    Memory: about 250 bytes per document.
    """
    order = (config or DedupConfig()).source_order
    best: dict[bytes, tuple[tuple[int, bytes], str]] = {}
    dropped: dict[str, bytes] = {}
    for document in documents:
        text = digest_string(document.text)
        key = (place_source(document.source, order), digest_string(document.id))
        if text not in best:
            best[text] = (key, document.id)
            continue
        if key < best[text][0]:
            dropped[best[text][1]] = text
            best[text] = (key, document.id)
        else:
            dropped[document.id] = text
    return {name: best[text][1] for name, text in dropped.items()}


def find_repeated_paragraphs(
    documents: Callable[[], Iterable[Document]],
    *,
    min_characters: int = 50,
    config: DedupConfig | None = None,
) -> dict[str, list[int]]:
    """Find repeated paragraphs; return a dict from document id to the indices of its paragraphs.

    One occurrence is kept: the first one in the document with the highest priority by
    `DedupConfig.source_order`, then length, then hashes of text and id. Paragraphs are separated by
    blank lines; short paragraphs are ignored, as they repeat by chance.

    Args:
        documents: function that returns an iterable of the documents; called twice.
        min_characters: length of the shortest paragraph to compare, in characters.
        config: settings; only `source_order` is used.
    """
    with tempfile.TemporaryDirectory() as folder:
        order = (config or DedupConfig()).source_order
        repeated = find_repeated_numbers(documents(), min_characters, Path(folder), order)
        return {
            document.id: numbers.tolist()
            for document, numbers in zip(documents(), repeated, strict=True)
            if len(numbers)
        }


def find_repeated_numbers(
    documents: Iterable[Document],
    min_characters: int,
    folder: Path,
    source_order: Sequence[str] = (),
    bound_bytes: int = _SORT_BYTES,
) -> Iterable[NDArray[np.int64]]:
    """Return the indices of each document's repeated paragraphs, in bounded memory.

    Args:
        documents: documents, in any order.
        min_characters: see `find_repeated_paragraphs`.
        folder: folder of temporary files, which must exist until the result has been read.
        source_order: see `DedupConfig`.
        bound_bytes: largest size of the paragraphs' hashes in memory, at 64 bytes per paragraph.
    """
    repeated = RepeatedItems(folder / "repeated")
    rows = SortedRows(folder / "rows", bound_bytes, _PARAGRAPH, _FIELDS)
    batch: list[tuple[int, ...]] = []
    for document in documents:
        text = document.text
        source = place_source(document.source, source_order)
        rank = (source, -len(text), _hash(text)[0], *_hash(document.id))
        parts = _BREAK.split(text)[::2]
        first = repeated.add_document(len(parts))
        batch += [
            (*_hash(part), *rank, first + number)
            for number, part in enumerate(parts)
            if len(part) >= min_characters
        ]
        if len(batch) >= _BATCH:
            rows.add(np.array(batch, _PARAGRAPH))
            batch = []
    rows.add(np.array(batch, _PARAGRAPH))
    for part in rows:  # equal paragraphs are adjacent, the one to keep first
        same = (part["high"][1:] == part["high"][:-1]) & (part["low"][1:] == part["low"][:-1])
        repeated.add_repeated(part["position"][1:][same])
    rows.close()
    return repeated


def _hash(text: str) -> tuple[int, int]:
    high, low = struct.unpack("<QQ", digest_string(text))
    return high, low


def locate_paragraphs(text: str, numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the offsets of paragraphs, given their indices from `find_repeated_paragraphs`."""
    places, at = [], 0
    for part in _BREAK.split(text):
        places.append((at, at + len(part)))
        at += len(part)
    return [places[2 * number] for number in numbers]


def cut_paragraphs(text: str, numbers: Iterable[int]) -> str:
    """Remove paragraphs from a text, given their indices from `find_repeated_paragraphs`."""
    parts = _BREAK.split(text)
    gone = set(numbers)
    remaining = [part for number, part in enumerate(parts[::2]) if number not in gone]
    return "\n\n".join(remaining)

"""Finds exact duplicates of documents and paragraphs, independent of the document order."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import numpy as np

from bmforge.data.dedup.clusters import place_source, rank_documents
from bmforge.data.dedup.minhash import DedupConfig
from bmforge.data.dedup.tokens import digest_string
from bmforge.data.sources.document import Document

__all__ = ["cut_paragraphs", "find_copies", "find_repeated_paragraphs", "locate_paragraphs"]

_BREAK = re.compile("(\n{2,})")


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
    blank lines; short ones are ignored, as they repeat by chance.

    Args:
        documents: function that returns an iterable of the documents; called twice.
        min_characters: length of the shortest paragraph to compare, in characters.
        config: settings; only `source_order` is used.
    """
    order = (config or DedupConfig()).source_order
    hashes, owners, numbers = [], [], []
    sources, sizes, texts, ids = [], [], [], []
    for at, document in enumerate(documents()):
        sources.append(place_source(document.source, order))
        sizes.append(len(document.text))
        texts.append(np.frombuffer(digest_string(document.text), np.uint64)[0])
        ids.append(np.frombuffer(digest_string(document.id), np.uint64))
        for number, part in enumerate(_BREAK.split(document.text)[::2]):
            if len(part) >= min_characters:
                hashes.append(np.frombuffer(digest_string(part), np.uint64))
                owners.append(at)
                numbers.append(number)
    if not hashes:
        return {}
    ranks = rank_documents(
        np.array(sources),
        np.array(sizes),
        np.array(texts, np.uint64),
        np.array(ids, np.uint64).reshape(-1, 2),
    )
    keys, owner, paragraph = np.array(hashes, np.uint64), np.array(owners), np.array(numbers)
    sort = np.lexsort((paragraph, ranks[owner], keys[:, 1], keys[:, 0]))
    same = (keys[sort][1:] == keys[sort][:-1]).all(axis=1)
    repeats: dict[int, list[int]] = {}
    for entry in sort[1:][same]:
        repeats.setdefault(int(owner[entry]), []).append(int(paragraph[entry]))
    return {
        document.id: sorted(repeats[at]) for at, document in enumerate(documents()) if at in repeats
    }


def locate_paragraphs(text: str, numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the offsets of paragraphs, given their indices from `find_repeated_paragraphs`."""
    places, at = [], 0
    for part in _BREAK.split(text):
        places.append((at, at + len(part)))
        at += len(part)
    return [places[2 * number] for number in numbers]


def cut_paragraphs(text: str, numbers: Iterable[int]) -> str:
    """Return a text without some paragraphs, given indices from `find_repeated_paragraphs`."""
    parts = _BREAK.split(text)
    gone = set(numbers)
    remaining = [part for number, part in enumerate(parts[::2]) if number not in gone]
    return "\n\n".join(remaining)

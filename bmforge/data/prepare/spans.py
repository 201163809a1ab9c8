"""Finds repeated spans and paragraphs in the kept documents, and cuts the later occurrences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bmforge.data.clean.drop import Drop, cut_excerpt
from bmforge.data.clean.normalize import normalise
from bmforge.data.dedup.exact import find_repeated_paragraphs, locate_paragraphs
from bmforge.data.dedup.spans import Spans, cut_spans, find_repeated_spans
from bmforge.data.prepare.documents import read_digests, read_shard
from bmforge.data.prepare.journal import write_hashed
from bmforge.data.prepare.masks import new_mask, open_mask
from bmforge.data.sources.document import Document
from bmforge.errors import ConfigError
from bmforge.prepare_settings import DuplicatesConfig

__all__ = ["REPEATED", "SPANS", "LeastRepeats", "Repeats", "check_spans", "choose_spans", "without"]

REPEATED = "repeated_spans"  # rule name of documents whose text is all repeated
SPANS = "spans"  # file name
_SIZES = "sizes"  # file name
_LEAST = 50  # tokens; shorter sequences often repeat by chance
_ROW = np.dtype([("position", "<i8"), ("start", "<i8"), ("end", "<i8")])
_SIZE = np.dtype([("position", "<i8"), ("text_bytes", "<i8")])


class LeastRepeats(NamedTuple):
    """Minimum lengths of repeats: spans in tokens, paragraphs in characters; None to skip them."""

    tokens: int | None
    characters: int | None


def check_spans(config: DuplicatesConfig) -> None:
    """Raise `ConfigError` if the minimum length of spans or paragraphs is too small."""
    if config.repeated_paragraphs is not None and config.repeated_paragraphs < 1:
        raise ConfigError(
            f"repeated_paragraphs={config.repeated_paragraphs} must be at least 1 character."
        )
    if config.repeated_spans is not None and config.repeated_spans < _LEAST:
        raise ConfigError(
            f"repeated_spans={config.repeated_spans} must be at least {_LEAST} words or Chinese "
            "characters, because shorter spans are repeated in good texts too."
        )


@dataclass(frozen=True)
class Repeats:
    """File of repeated spans to remove, written by `choose_spans`, and the minimum length of a
    span.
    """

    path: Path
    least: LeastRepeats

    def read(self, first: int, count: int) -> dict[int, Spans]:
        """Return a dict from position to the spans to cut, for the documents in a range.

        Args:
            first: first position of the range.
            count: number of documents in the range.
        """
        spans: dict[int, Spans] = {}
        for position, start, stop in _read_range(self.path, _ROW, first, count).tolist():
            spans.setdefault(position, []).append((start, stop))
        return spans

    def update_sizes(self, first: int, sizes_bytes: NDArray[np.int64]) -> None:
        """Replace the sizes of texts by their sizes without the repeated spans.

        Args:
            first: position of the first document.
            sizes_bytes: UTF-8 bytes per document; changed in place.
        """
        rows = _read_range(self.path.with_name(_SIZES), _SIZE, first, len(sizes_bytes))
        sizes_bytes[rows["position"] - first] = rows["text_bytes"]

    def describe(self, document: Document) -> Drop:
        """Return a `Drop` that reports a document that consists only of repeated text."""
        bound = self.least.tokens or self.least.characters
        return Drop(REPEATED, None, bound, cut_excerpt(document.text))


def _read_range(path: Path, row: np.dtype[np.void], first: int, count: int) -> NDArray[np.void]:
    """Return the rows of the documents in a range, from a file sorted by position."""
    rows = np.fromfile(path, dtype=row)
    return rows[slice(*np.searchsorted(rows["position"], [first, first + count]))]


def without(document: Document, spans: Spans) -> Document:
    """Return the document with the given spans cut from its text."""
    return replace(document, text=normalise(cut_spans(document.text, spans)))


def choose_spans(
    documents: Path, counts: Sequence[int], before: Path, folder: Path, least: LeastRepeats
) -> dict[str, Any]:
    """Find repeats; write their list, ``spans``, the new ``sizes``, and the mask ``kept``.

    Documents that consist only of repeats are dropped in the mask.

    Args:
        documents: folder of the first stage.
        counts: documents per shard.
        before: path of the mask of the documents kept so far.
        folder: output folder.
        least: minimum lengths of repeats.

    Returns:
        dict with ``files`` (file names and hashes), ``documents`` and ``read_bytes`` (number and
        raw bytes of the dropped documents), ``text_bytes`` (of the remaining documents), and
        ``changed`` (number of cut documents, and of characters removed).
    """
    mask = open_mask(before)

    def kept() -> Iterator[tuple[int, Document]]:
        position = 0
        for number in range(len(counts)):
            for document in read_shard(documents, number):
                if mask[position]:
                    yield position, document
                position += 1

    folder.mkdir(parents=True, exist_ok=True)
    find_spans = _find_repeats(lambda: (document for _, document in kept()), least, folder)
    rows: list[tuple[int, int, int]] = []
    sizes: list[tuple[int, int]] = []
    gone: list[int] = []
    changed, text_bytes = [0, 0], 0
    for position, document in kept():
        spans = find_spans(document)
        left = without(document, spans) if spans else document
        rows += [(position, start, end) for start, end in spans]
        text_bytes += (size := len(left.text.encode()))
        if not left.text:
            gone.append(position)
        elif spans:
            sizes.append((position, size))
            changed = [changed[0] + 1, changed[1] + len(document.text) - len(left.text)]
    files: dict[str, str] = {}
    for name, table in ((SPANS, np.array(rows, _ROW)), (_SIZES, np.array(sizes, _SIZE))):
        with write_hashed(folder / name, files) as file:
            file.write(table.tobytes())
    with new_mask(folder, "kept", len(mask), files) as after:
        after[:] = mask
        after[gone] = False
    read_bytes = _sum_read(documents, counts, gone)
    result = {"documents": len(gone), "read_bytes": read_bytes, "text_bytes": text_bytes}
    return {"files": files, "changed": changed, **result}


def _find_repeats(
    documents: Callable[[], Iterator[Document]], least: LeastRepeats, folder: Path
) -> Callable[[Document], Spans]:
    """Find the repeats in all documents.

    Return a function that maps a document to the spans to cut.
    """
    spans: dict[str, Spans] = {}
    paragraphs: dict[str, list[int]] = {}
    if least.tokens:
        spans = find_repeated_spans(documents, min_tokens=least.tokens, work_dir=folder)
    if least.characters:
        paragraphs = find_repeated_paragraphs(documents, min_characters=least.characters)

    def find(document: Document) -> Spans:
        numbers = paragraphs.get(document.id, [])
        return _merge([*spans.get(document.id, []), *locate_paragraphs(document.text, numbers)])

    return find


def _merge(spans: Spans) -> Spans:
    """Sort spans and merge overlapping ones."""
    merged: Spans = []
    for begin, end in sorted(spans):
        if merged and begin < merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def _sum_read(documents: Path, counts: Sequence[int], gone: Sequence[int]) -> int:
    """Return the total raw size, in bytes, of the removed documents (positions `gone`)."""
    total, first, places = 0, 0, np.array(gone, dtype=np.int64)
    for number, count in enumerate(counts):
        in_shard = places[(places >= first) & (places < first + count)] - first
        total += (
            int(read_digests(documents, number)["read_bytes"][in_shard].sum())
            if len(in_shard)
            else 0
        )
        first += count
    return total

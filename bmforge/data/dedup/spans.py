"""Finds long spans of text that occurred before, in another document or in the same one.

A repeated sequence of 50 tokens starts a span; overlapping sequences are merged. Equal sequences
are found by sorting their 64-bit hashes in files, so no suffix array is needed, and the memory does
not grow with the text. Among 200 million sequences, the probability of any hash
collision is 0.1 %.
Source: Lee et al. 2022, arXiv:2107.06499 (definition of repeats; found there by a suffix array).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bmforge.data.dedup.files import RepeatedItems
from bmforge.data.dedup.tokens import hash_runs, hash_tokens, locate_tokens
from bmforge.data.sources.document import Document
from bmforge.errors import ConfigError

__all__ = [
    "Spans",
    "cover_runs",
    "cut_spans",
    "find_repeated_runs",
    "find_repeated_spans",
    "locate_runs",
]

Spans = list[tuple[int, int]]

_PARTS = 256  # files by hash; one of them, or a slice of it, is sorted at a time
_SLICE_BYTES = 1 << 26
_BATCH = 1 << 17  # n-grams that are written together
_READ_ENTRIES = 1 << 18
_ENTRY = np.dtype([("hash", "<u8"), ("place", "<i8")])


def find_repeated_spans(
    documents: Callable[[], Iterable[Document]],
    *,
    min_tokens: int = 50,
    work_dir: str | os.PathLike[str] | None = None,
) -> dict[str, Spans]:
    """Find repeated spans; return a dict from document id to (start, end) offsets of its spans.

    The first occurrence, in the order of reading, is kept.

    Args:
        documents: function that returns an iterable of the documents; called twice, and must
            return the same documents in the same order.
        min_tokens: length of the shortest span, in words or Chinese characters.
        work_dir: folder of temporary files, 16 bytes per token.

    Raises:
        ConfigError: `min_tokens` is below 2.
    """
    if min_tokens < 2:
        raise ConfigError(f"min_tokens={min_tokens} must be at least 2.")
    with tempfile.TemporaryDirectory(dir=work_dir) as folder:
        runs = find_repeated_runs(documents(), min_tokens, Path(folder))
        return {
            document.id: locate_runs(document.text, starts, min_tokens)
            for document, starts in zip(documents(), runs, strict=True)
            if len(starts)
        }


def find_repeated_runs(
    documents: Iterable[Document], length: int, folder: Path
) -> Iterable[NDArray[np.int64]]:
    """Find token n-grams that occurred before, in the same or an earlier document.

    The result yields an array for each document: the sorted indices of the tokens at which its
    repeated n-grams begin.

    Args:
        documents: documents, in the order in which the first occurrence is kept.
        length: number of tokens per n-gram.
        folder: folder of temporary files, which must exist until the result has been read.

    Memory: about 200 MB, whatever the number of documents.
    """
    runs, parts = RepeatedItems(folder / "repeated"), folder / "parts"
    parts.mkdir(parents=True)
    _write_runs(documents, length, parts, runs)
    for part in parts.iterdir():
        for repeated in _repeated_places(part):
            runs.add_repeated(repeated)
    shutil.rmtree(parts)
    return runs


def _write_runs(
    documents: Iterable[Document], length: int, folder: Path, runs: RepeatedItems
) -> None:
    """Write the hash and position of every token n-gram to files partitioned by hash."""
    batch, waiting = [np.empty(0, _ENTRY)], 0
    for document in documents:
        tokens, _ = locate_tokens(document.text)
        first = runs.add_document(len(tokens))
        hashes = hash_runs(hash_tokens(tokens), length)
        entries = np.empty(len(hashes), _ENTRY)
        entries["hash"], entries["place"] = hashes, np.arange(first, first + len(hashes))
        batch.append(entries)
        waiting += len(entries)
        if waiting >= _BATCH:
            _write_batch(np.concatenate(batch), folder)
            batch, waiting = batch[:1], 0
    _write_batch(np.concatenate(batch), folder)


def _write_batch(entries: NDArray[np.void], folder: Path) -> None:
    part = (entries["hash"] % np.uint64(_PARTS)).astype(np.int64)
    order = np.argsort(part, kind="stable")
    entries, bounds = entries[order], np.searchsorted(part[order], np.arange(_PARTS + 1))
    for number in np.flatnonzero(np.diff(bounds)).tolist():
        with (folder / str(number)).open("ab") as file:
            file.write(entries[bounds[number] : bounds[number + 1]].tobytes())


def _repeated_places(path: Path) -> Iterator[NDArray[np.int64]]:
    """Yield the positions of the n-grams in a file that repeat an earlier one."""
    slices = -(-path.stat().st_size // _SLICE_BYTES)
    for number in range(slices):
        entries = _read_slice(path, number, slices)
        # Entries are in the order of their positions, so the first of equal ones is the earliest.
        entries = entries[np.argsort(entries["hash"], kind="stable")]
        same = entries["hash"][1:] == entries["hash"][:-1]
        yield entries["place"][1:][same]


def _read_slice(path: Path, number: int, slices: int) -> NDArray[np.void]:
    """Return the entries of a file whose hashes are in slice `number` of `slices`."""
    chosen = [np.empty(0, _ENTRY)]
    with path.open("rb") as file:
        while len(entries := np.fromfile(file, _ENTRY, _READ_ENTRIES)):
            slice_of = entries["hash"] // np.uint64(_PARTS) % np.uint64(slices)
            chosen.append(entries[slice_of == number])
    return np.concatenate(chosen)


def locate_runs(text: str, starts: NDArray[np.int64], length: int) -> Spans:
    """Return the text spans covered by n-grams, given the indices of their first tokens."""
    return cover_runs(locate_tokens(text)[1], starts, length) if len(starts) else []


def cover_runs(
    spots: Sequence[tuple[int, int]], starts: Iterable[int] | NDArray[np.int64], length: int
) -> Spans:
    """Return the text spans covered by sequences of `length` tokens; adjacent spans are merged.

    Args:
        spots: start and end offsets of each token.
        starts: sorted indices of the first tokens of the sequences.
        length: number of tokens per sequence.
    """
    covered: list[list[int]] = []  # spans as token offsets
    for first in map(int, starts):
        if covered and first <= covered[-1][1]:
            covered[-1][1] = first + length
        else:
            covered.append([first, first + length])
    return [(spots[first][0], spots[last - 1][1]) for first, last in covered]


def cut_spans(text: str, spans: Iterable[tuple[int, int]]) -> str:
    """Remove the given spans, which must not overlap, from a text."""
    remaining, at = [], 0
    for start, end in sorted(spans):
        remaining.append(text[at:start])
        at = end
    return "".join((*remaining, text[at:]))

"""Finds long spans of text that occurred before, in another document or in the same one.

A repeated sequence of 50 tokens starts a span; overlapping sequences are merged. Equal sequences
are found by sorting their 64-bit hashes, so no suffix array is needed, and with partitions on disk
the memory does not grow with the text. Among 200 million sequences, the probability of any hash
collision is 0.1 %.
Source: Lee et al. 2022, arXiv:2107.06499 (definition of repeats; found there by a suffix array).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from bmforge.data.dedup.tokens import hash_runs, hash_tokens, locate_tokens
from bmforge.data.sources.document import Document
from bmforge.errors import ConfigError

__all__ = ["Spans", "cover_runs", "cut_spans", "find_repeated_spans"]

Spans = list[tuple[int, int]]

_PARTS = 64  # files by hash; one of them is sorted at a time
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
        ends = _write_runs(documents(), min_tokens, Path(folder))
        parts = [_repeated_places(Path(folder, str(part))) for part in range(_PARTS)]
    places = np.sort(np.concatenate(parts))
    spans: dict[str, Spans] = {}
    start = 0
    for document, end in zip(documents(), ends, strict=True):
        low, high = np.searchsorted(places, (start, end))
        if high > low:
            _, spots = locate_tokens(document.text)
            spans[document.id] = cover_runs(spots, places[low:high] - start, min_tokens)
        start = end
    return spans


def _write_runs(documents: Iterable[Document], length: int, folder: Path) -> list[int]:
    """Write the hash and position of every token n-gram to files partitioned by hash.

    Return the position after the last n-gram of each document.
    """
    ends, end = [], 0
    with _open_parts(folder) as files:
        for document in documents:
            tokens, _ = locate_tokens(document.text)
            hashes = hash_runs(hash_tokens(tokens), length)
            entries = np.empty(len(hashes), _ENTRY)
            entries["hash"] = hashes
            entries["place"] = np.arange(end, end + len(hashes))
            part = (hashes % np.uint64(_PARTS)).astype(np.int64)
            order = np.argsort(part, kind="stable")
            bounds = np.searchsorted(part[order], np.arange(_PARTS + 1))
            for number in np.flatnonzero(np.diff(bounds)):
                files[number].write(entries[order[bounds[number] : bounds[number + 1]]].tobytes())
            end += len(tokens)
            ends.append(end)
    return ends


@contextmanager
def _open_parts(folder: Path) -> Iterator[list[BinaryIO]]:
    with ExitStack() as stack:
        yield [stack.enter_context((folder / str(part)).open("wb")) for part in range(_PARTS)]


def _repeated_places(path: Path) -> NDArray[np.int64]:
    """Return the positions of all n-grams that repeat an earlier one with the same hash."""
    entries = np.fromfile(path, _ENTRY)
    entries = entries[np.lexsort((entries["place"], entries["hash"]))]
    same = entries["hash"][1:] == entries["hash"][:-1]
    return entries["place"][1:][same]


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

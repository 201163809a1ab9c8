"""Finds test examples in training text by common runs of 13 words or 30 Chinese characters.

Source: Brown et al. 2020, arXiv:2005.14165, appendix C (13 words). A shorter example must occur as
a whole, and have at least 8 words or 15 characters.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bmforge.data.clean.characters import HAN_RUN
from bmforge.data.clean.drop import Drop, cut_excerpt
from bmforge.data.dedup.spans import cover_runs, cut_spans
from bmforge.data.dedup.tokens import Hashes, hash_runs, hash_tokens, locate_tokens
from bmforge.data.sources.conversations import read_records
from bmforge.data.sources.document import Document
from bmforge.data.sources.packed import PACKED

__all__ = [
    "Decontaminate",
    "Overlap",
    "OverlapIndex",
    "OverlapLengths",
    "examples_of",
    "find_overlap",
]

RULE = "test_example"


@dataclass(frozen=True)
class Overlap:
    """Span of a document that also occurs in a test example."""

    example: str
    start: int
    end: int


@dataclass(frozen=True)
class OverlapLengths:
    """Minimum length of a match, and minimum length of examples that must match as a whole."""

    words: int = 13
    characters: int = 30
    whole_words: int = 8
    whole_characters: int = 15


class OverlapIndex:
    """Index of the token sequences of test examples.

    Args:
        examples: (name, text) of each example.
    """

    def __init__(
        self, examples: Iterable[tuple[str, str]], lengths: OverlapLengths | None = None
    ) -> None:
        self.lengths = lengths or OverlapLengths()
        self.names: list[str] = []
        self.too_short = 0
        runs: dict[int, list[tuple[Hashes, int]]] = {}
        for name, text in examples:
            tokens, _ = locate_tokens(text)
            length = self._length_for(tokens)
            if length == 0:
                self.too_short += 1
                continue
            hashes = hash_runs(hash_tokens(tokens), length)
            runs.setdefault(length, []).append((hashes, len(self.names)))
            self.names.append(name)
        self._runs = {length: _sort_runs(hashed) for length, hashed in sorted(runs.items())}

    def _length_for(self, tokens: list[str]) -> int:
        """Return the match length in tokens for an example; 0 if the example is too short."""
        chinese = 2 * sum(HAN_RUN.fullmatch(token) is not None for token in tokens) > len(tokens)
        lengths = self.lengths
        long = lengths.characters if chinese else lengths.words
        least = lengths.whole_characters if chinese else lengths.whole_words
        return min(long, len(tokens)) if len(tokens) >= least else 0

    def digest(self) -> str:
        """Return a hash of the whole index (token sequences and example names)."""
        state = blake2b(digest_size=16)
        for length, (hashes, owners) in self._runs.items():
            state.update(f"{length} ".encode() + hashes.tobytes() + owners.tobytes())
        state.update("\n".join(self.names).encode("utf-8", "surrogatepass"))
        return state.hexdigest()

    def find(self, tokens: Hashes) -> Iterator[tuple[int, int, int]]:
        """Yield (example index, index of the first token, length in tokens) of each match."""
        for length, (hashes, owners) in self._runs.items():
            runs = hash_runs(tokens, length)
            at = np.minimum(np.searchsorted(hashes, runs), len(hashes) - 1)
            for first in np.flatnonzero(hashes[at] == runs):
                yield int(owners[at[first]]), int(first), length


def _sort_runs(hashed: list[tuple[Hashes, int]]) -> tuple[Hashes, NDArray[np.int64]]:
    """Return the distinct hashes, sorted, and the index of the first example with each hash."""
    hashes = np.concatenate([part for part, _ in hashed])
    owners = np.concatenate([np.full(len(part), owner) for part, owner in hashed])
    hashes, first = np.unique(hashes, return_index=True)
    return hashes, owners[first]


def find_overlap(text: str, index: OverlapIndex) -> list[Overlap]:
    """Return the spans of a text that occur in test examples; adjacent matches are merged."""
    tokens, spots = locate_tokens(text)
    runs: dict[tuple[int, int], list[int]] = {}
    for owner, first, length in index.find(hash_tokens(tokens)):
        runs.setdefault((owner, length), []).append(first)
    overlaps = [
        Overlap(index.names[owner], start, end)
        for (owner, length), starts in runs.items()
        for start, end in cover_runs(spots, starts, length)
    ]
    return sorted(overlaps, key=lambda overlap: (overlap.start, overlap.end, overlap.example))


@dataclass(frozen=True)
class Decontaminate:
    """A step that drops documents containing test examples, or cuts the examples out.

    Attributes:
        cut: True to remove only the matching spans; a document that becomes empty is dropped.
    """

    index: OverlapIndex
    cut: bool = False

    @property
    def version(self) -> str:
        """Version of the step: a string that changes whenever its results may change."""
        return f"overlap=1 cut={self.cut} {self.index.digest()}"

    def __call__(self, document: Document) -> Document | Drop:
        """Return the document, without matches if `cut`, or a `Drop` naming the test example."""
        hits = find_overlap(document.text, self.index)
        if not hits:
            return document
        if self.cut and (text := self._cut(document.text, hits)).strip():
            return replace(document, text=text)
        excerpt = cut_excerpt(document.text[: hits[0].end], hits[0].start)
        return Drop(RULE, hits[0].example, None, excerpt)

    @staticmethod
    def _cut(text: str, hits: list[Overlap]) -> str:
        spans: list[tuple[int, int]] = []
        for hit in hits:
            if spans and hit.start <= spans[-1][1]:
                spans[-1] = (spans[-1][0], max(spans[-1][1], hit.end))
            else:
                spans.append((hit.start, hit.end))
        return cut_spans(text, spans)


def examples_of(
    source: str | os.PathLike[str] | Iterable[Mapping[str, Any]], name: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield the name and text of every string in the rows of a test set, at any nesting level.

    Args:
        source: path of a JSON file or a table, or rows from `bmforge.data.tasks`.
        name: name of the set (default: the file's name).

    Raises:
        DataError: the file has a different format, or a line is not JSON.
        MissingDependencyError: a Parquet file is read, and pyarrow is not installed.
    """
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        rows: Iterable[Any] = (row for _, row in read_records(path))
        name = name or (Path(path.stem) if path.suffix in PACKED else path).stem
    else:
        rows = source
    for number, row in enumerate(rows, 1):
        for field, text in _strings(row, ""):
            yield f"{name}:{number}{field}", text


def _strings(value: Any, field: str) -> Iterator[tuple[str, str]]:
    """Yield the key path and the text of each string in a nested value."""
    if isinstance(value, str):
        yield field, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _strings(inner, f"{field}.{key}")
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _strings(inner, f"{field}.{number}")

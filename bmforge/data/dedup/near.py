"""Near duplicates across documents: sketches, candidates, exact comparison, clusters.

Two readings of the documents: the first makes sketches (112 bytes a document at the usual
threshold), the second keeps the n-grams of candidates alone, in a file. So memory grows by about
150 bytes a document, and nothing depends on the order of the documents.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bmforge.data.clean.drop import Drop, cut_excerpt
from bmforge.data.dedup.clusters import (
    Clusters,
    equal_groups,
    join_group,
    place_source,
    rank_documents,
)
from bmforge.data.dedup.index import SketchIndex
from bmforge.data.dedup.minhash import DedupConfig, MinHasher, jaccard
from bmforge.data.dedup.tokens import Hashes, digest_string
from bmforge.data.sources.document import Document

__all__ = ["RULE", "NearDuplicates", "Sketches", "find_near_duplicates", "read_sketches"]

RULE = "near_duplicate"


@dataclass(frozen=True)
class NearDuplicates:
    """Which documents are to be dropped.

    Attributes:
        survivor: id of each dropped document, and the id of what survives in its cluster.
        similarity: id of each dropped document, and its similarity to the member that drew it in.
        compared: pairs that were compared exactly.
    """

    survivor: dict[str, str] = field(default_factory=dict)
    similarity: dict[str, float] = field(default_factory=dict)
    compared: int = 0

    def judge(self, document: Document, threshold: float) -> Document | Drop:
        """Return the document, or why it is dropped: what it is a duplicate of is the excerpt's."""
        if document.id not in self.survivor:
            return document
        value = self.similarity.get(document.id)
        return Drop(RULE, value, threshold, cut_excerpt(document.text))


@dataclass
class Sketches:
    """What is kept of documents on the first reading; parts of a corpus can be joined.

    Shape: keys (N, bands); sources, sizes, texts (N,); ids (N, 2). A document without words has
    keys that no other has.
    """

    keys: Hashes
    sources: NDArray[np.int64]
    sizes: NDArray[np.int64]
    texts: Hashes
    ids: Hashes

    @staticmethod
    def concatenate(parts: Sequence[Sketches]) -> Sketches:
        """Return the sketches of all parts, in their order."""
        return Sketches(
            np.concatenate([one.keys for one in parts]),
            np.concatenate([one.sources for one in parts]),
            np.concatenate([one.sizes for one in parts]),
            np.concatenate([one.texts for one in parts]),
            np.concatenate([one.ids for one in parts]),
        )


def read_sketches(documents: Iterable[Document], hasher: MinHasher) -> Sketches:
    """Return the sketches of documents; a worker can do this for one shard."""
    keys, sources, sizes, texts, ids = [], [], [], [], []
    for document in documents:
        shingles = hasher.shingle(document.text)
        id = np.frombuffer(digest_string(document.id), np.uint64)
        keys.append(hasher.sketch(shingles) if len(shingles) else np.resize(id, hasher.bands))
        sources.append(place_source(document.source, hasher.config.source_order))
        sizes.append(len(document.text))
        texts.append(np.frombuffer(digest_string(document.text), np.uint64)[0])
        ids.append(id)
    return Sketches(
        np.array(keys, np.uint64).reshape(-1, hasher.bands),
        np.array(sources, np.int64),
        np.array(sizes, np.int64),
        np.array(texts, np.uint64),
        np.array(ids, np.uint64).reshape(-1, 2),
    )


class _Shingles:
    """N-gram hashes of some documents, in a file without a name."""

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._places: dict[int, tuple[int, int]] = {}
        self._end = 0

    def add(self, number: int, shingles: Hashes) -> None:
        """Keep the hashes of one document."""
        self._file.seek(self._end)
        self._file.write(shingles.tobytes())
        self._places[number] = (self._end, len(shingles))
        self._end += len(shingles) * 8

    def read(self, number: int) -> Hashes:
        """Return the hashes of one document."""
        start, count = self._places[number]
        self._file.seek(start)
        return np.frombuffer(self._file.read(count * 8), np.uint64)

    def close(self) -> None:
        """Give the file back."""
        self._file.close()


def find_near_duplicates(
    documents: Callable[[], Iterable[Document]],
    config: DedupConfig | None = None,
    *,
    known: Sequence[str | os.PathLike[str]] = (),
    sketches: Sketches | None = None,
    shingle: Callable[[str], Hashes] | None = None,
    work_dir: str | os.PathLike[str] | None = None,
) -> NearDuplicates:
    """Find the documents that nearly repeat another one, and which of each cluster survives.

    Args:
        documents: called for each of two readings; both must give the same documents in one order.
        known: folders of `write_index`: what repeats a document there is dropped.
        sketches: of the first reading, where workers have made them.
        shingle: another way to n-gram hashes; it must return them sorted and without repeats.
        work_dir: where the candidates' n-grams lie meanwhile.
    """
    config = config or DedupConfig()
    hasher = MinHasher(config, shingle)
    new = read_sketches(documents(), hasher) if sketches is None else sketches
    indexes = [SketchIndex(Path(folder), hasher) for folder in known]
    old = sum(len(one.ids) for one in indexes)
    # Numbers are ranks: first what earlier corpora hold, then ours in the order of survival.
    numbers = old + rank_documents(new.sources, new.sizes, new.texts, new.ids)
    keys = np.concatenate([*(one.keys for one in indexes), new.keys])
    numbers = np.concatenate([np.arange(old), numbers])
    groups = [
        group
        for band in range(hasher.bands)
        for group in equal_groups(keys[:, band], numbers)
        if group[-1] >= old
    ]
    wanted = set(map(int, np.unique(np.concatenate(groups)))) if groups else set()
    shingles = _Shingles(work_dir)
    try:
        ids = _read_candidates(documents, hasher, numbers[old:], wanted, shingles)
        offset = 0
        for one in indexes:
            for place, name in enumerate(one.ids):
                if offset + place in wanted:
                    ids[offset + place] = name
                    shingles.add(offset + place, one.shingles(place))
            offset += len(one.ids)
        return _cluster(groups, old, ids, shingles, config)
    finally:
        shingles.close()


def _read_candidates(
    documents: Callable[[], Iterable[Document]],
    hasher: MinHasher,
    numbers: NDArray[np.int64],
    wanted: set[int],
    shingles: _Shingles,
) -> dict[int, str]:
    """Read the documents again; return the ids of candidates, and keep their n-grams."""
    ids: dict[int, str] = {}
    if not wanted:
        return ids
    for number, document in zip(map(int, numbers), documents(), strict=True):
        if number in wanted:
            ids[number] = document.id
            if hasher.config.verify:
                shingles.add(number, hasher.shingle(document.text))
    return ids


def _cluster(
    groups: list[NDArray[np.int64]],
    old: int,
    ids: dict[int, str],
    shingles: _Shingles,
    config: DedupConfig,
) -> NearDuplicates:
    """Compare the candidates of every group, and return what is found."""
    places = {number: place for place, number in enumerate(sorted(ids))}
    order = sorted(ids)
    clusters = Clusters(len(order))
    similarity: dict[int, float] = {}
    done: dict[tuple[int, int], bool] = {}

    def similar(first: int, second: int) -> bool:
        if order[second] < old:  # two documents of earlier corpora
            return False
        if (first, second) not in done:
            value = jaccard(shingles.read(order[first]), shingles.read(order[second]))
            done[first, second] = value >= config.threshold
            if done[first, second]:
                for one in (first, second):
                    similarity[one] = max(similarity.get(one, 0.0), value)
        return done[first, second]

    for group in groups:
        members = sorted(places[int(number)] for number in group)
        join_group(clusters, members, similar if config.verify else None)
    found = NearDuplicates(compared=len(done))
    for member, root in clusters.members():
        if order[member] >= old:
            found.survivor[ids[order[member]]] = ids[order[root]]
            if member in similarity:
                found.similarity[ids[order[member]]] = similarity[member]
    return found

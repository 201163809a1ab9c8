"""Near duplicates across documents: sketches, candidates, exact comparison, clusters.

Two readings of the documents: the first makes sketches (144 bytes a document at the usual
threshold), which may lie in files; one band of them at a time is sorted, through files above a
bound. The second keeps the n-grams of candidates, in a file, as their groups are. So memory grows
with the candidates alone, by some hundred bytes each, and nothing depends on the order of the
documents.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

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
from bmforge.data.dedup.files import Groups, Shingles
from bmforge.data.dedup.index import SketchIndex
from bmforge.data.dedup.minhash import DedupConfig, MinHasher, jaccard
from bmforge.data.dedup.sort import ROW, SortedRows
from bmforge.data.dedup.tokens import Hashes, digest_string
from bmforge.data.sources.document import Document

__all__ = [
    "RULE",
    "NearDuplicates",
    "NearPlaces",
    "Sketches",
    "find_near_duplicates",
    "find_near_places",
    "read_sketches",
]

RULE = "near_duplicate"
SORT_BYTES = 1 << 25
_MOST_REMEMBERED = 1 << 18  # pairs that were compared and are no duplicates


@dataclass(frozen=True)
class NearDuplicates:
    """Documents to drop as near duplicates, by id.

    Attributes:
        survivor: id of each dropped document, and the id of what survives in its cluster.
        similarity: id of each dropped document, and its similarity to the member that drew it in.
        place: id of each dropped document, and its place among the documents.
        compared: pairs that were compared exactly.
    """

    survivor: dict[str, str] = field(default_factory=dict)
    similarity: dict[str, float] = field(default_factory=dict)
    place: dict[str, int] = field(default_factory=dict, compare=False)
    compared: int = 0

    def judge(self, document: Document, threshold: float) -> Document | Drop:
        """Return the document, or why it is dropped: what it is a duplicate of is the excerpt's."""
        if document.id not in self.survivor:
            return document
        value = self.similarity.get(document.id)
        return Drop(RULE, value, threshold, cut_excerpt(document.text))


class NearPlaces(NamedTuple):
    """Documents to drop as near duplicates, by position.

    Shape: each (D,), in the order of the places; similarity is NaN where nothing was compared,
        survivors are numbers that are equal in a cluster and nowhere else.
    """

    places: NDArray[np.int64]
    similarity: NDArray[np.float64]
    survivors: NDArray[np.int64]
    compared: int


@dataclass
class Sketches:
    """What is kept of documents of a part of the corpus on the first reading.

    Shape: keys (N, bands), in Fortran's order where they are mapped from a file; sources, sizes,
    texts (N,); ids (N, 2). A document without words has keys that no other has.
    """

    keys: Hashes
    sources: NDArray[np.int64]
    sizes: NDArray[np.int64]
    texts: Hashes
    ids: Hashes


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


def find_near_duplicates(
    documents: Callable[[], Iterable[Document]], config: DedupConfig | None = None, **options: Any
) -> NearDuplicates:
    """Find the documents that nearly repeat another one, and which of each cluster survives.

    Args:
        documents: called for each of two readings; both must give the same documents in one order.
        config: how.
        options: those of `find_near_places`, but `names`.
    """
    names: dict[int, str] = {}
    found = find_near_places(documents, config, names=names, **options)
    gone = [names[place] for place in found.places.tolist()]
    kept = [names[~survivor] for survivor in found.survivors.tolist()]
    return NearDuplicates(
        dict(zip(gone, kept, strict=True)),
        {
            name: value
            for name, value in zip(gone, found.similarity.tolist(), strict=True)
            if not math.isnan(value)
        },
        dict(zip(gone, found.places.tolist(), strict=True)),
        found.compared,
    )


def find_near_places(
    documents: Callable[[], Iterable[Document]],
    config: DedupConfig | None = None,
    *,
    known: Sequence[str | os.PathLike[str]] = (),
    sketches: Callable[[], Iterable[Sketches]] | None = None,
    shingle: Callable[[str], Hashes] | None = None,
    work_dir: str | os.PathLike[str] | None = None,
    bound_bytes: int = SORT_BYTES,
    names: dict[int, str] | None = None,
) -> NearPlaces:
    """Find near duplicates like `find_near_duplicates`, but by position and in bounded memory.

    Args:
        documents: called for each of two readings; both must give the same documents in one order.
        config: how.
        known: folders of `write_index`: what repeats a document there is dropped.
        sketches: of the first reading, where workers have made them: called for each band, and
            gives the parts of the corpus in order.
        shingle: another way to n-gram hashes; it must return them sorted and without repeats.
        work_dir: where files lie meanwhile: a band's keys, the candidates' n-grams.
        bound_bytes: of a band's keys in memory, 32 a document; above it they are sorted in files.
        names: filled with the id of each candidate, by its place, and by ``~number`` for what
            may survive.
    """
    config = config or DedupConfig()
    hasher = MinHasher(config, shingle)
    if sketches is None:
        made = read_sketches(documents(), hasher)
        sketches = lambda: (made,)  # noqa: E731
    indexes = [SketchIndex(Path(folder), hasher) for folder in known]
    old = sum(len(one.ids) for one in indexes)
    with tempfile.TemporaryDirectory(dir=work_dir) as folder:
        groups = Groups(Path(folder), hasher.bands)
        for band in range(hasher.bands):
            keys = chain((one.keys for one in indexes), (one.keys for one in sketches()))
            for found in _equal_groups(keys, band, Path(folder) / "band", bound_bytes, old):
                groups.add(band, *found)
        candidates = _Candidates.find(groups, hasher.bands, sketches(), old)
        shingles = Shingles(len(candidates.order), work_dir)
        try:
            _read_candidates(documents, hasher, candidates, shingles, names)
            _read_known(indexes, candidates, shingles, names)
            return _cluster(groups, candidates, shingles, config)
        finally:
            shingles.close()


def _equal_groups(
    keys: Iterable[Hashes], band: int, folder: Path, bound_bytes: int, old: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield groups of documents with one key in a band, some at a time; each has one of ours."""
    rows, first = SortedRows(folder, bound_bytes), 0
    for part in keys:
        new = np.zeros(len(part), ROW)
        new["high"], new["position"] = part[:, band], np.arange(first, first + len(part))
        rows.add(new)
        first += len(part)
    for found in rows:  # equal keys come together
        yield equal_groups(found["high"], found["position"], old)
    rows.close()


@dataclass
class _Candidates:
    """Documents that share a band with another one; each has a number.

    Those of earlier corpora come first, ours behind them in the order in which they survive.

    Attributes:
        places: of all, sorted; ours lie behind the earlier corpora's.
        numbers: of the same.
        order: the places by number.
        old: how many documents earlier corpora have.
        known: how many candidates are theirs.
    """

    places: NDArray[np.int64]
    numbers: NDArray[np.int64]
    order: NDArray[np.int64]
    old: int
    known: int

    @classmethod
    def find(cls, groups: Groups, bands: int, parts: Iterable[Sketches], old: int) -> _Candidates:
        """Return those of groups, ranked by what was sketched of them."""
        places = np.zeros(0, np.int64)
        for band in range(bands):
            places = np.union1d(places, groups.members(band))
        known = int(np.searchsorted(places, old))
        numbers = np.arange(len(places))
        numbers[known:] = known + _rank(places[known:] - old, parts)
        order = np.empty_like(places)
        order[numbers] = places
        return cls(places, numbers, order, old, known)

    def number(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers of some, sorted."""
        return np.sort(self.numbers[np.searchsorted(self.places, places)])


def _rank(places: NDArray[np.int64], parts: Iterable[Sketches]) -> NDArray[np.int64]:
    """Return the rank of documents at places, sorted, in the order of survival: (N,)."""
    count, first = len(places), 0
    sources, sizes = np.empty(count, np.int64), np.empty(count, np.int64)
    texts, ids = np.empty(count, np.uint64), np.empty((count, 2), np.uint64)
    for part in parts:
        here = slice(*np.searchsorted(places, [first, first + len(part.sizes)]))
        inside = places[here] - first
        sources[here], sizes[here] = part.sources[inside], part.sizes[inside]
        texts[here], ids[here] = part.texts[inside], part.ids[inside]
        first += len(part.sizes)
    return rank_documents(sources, sizes, texts, ids)


def _read_candidates(
    documents: Callable[[], Iterable[Document]],
    hasher: MinHasher,
    candidates: _Candidates,
    shingles: Shingles,
    names: dict[int, str] | None,
) -> None:
    """Read the documents again, and keep the candidates' n-grams, and their names if asked to."""
    places = candidates.places[candidates.known :] - candidates.old
    at = 0
    for here, document in enumerate(documents() if len(places) else ()):
        if at == len(places) or here != places[at]:
            continue
        number = int(candidates.numbers[candidates.known + at])
        if names is not None:
            names[here] = names[~number] = document.id
        if hasher.config.verify:
            shingles.add(number, hasher.shingle(document.text))
        at += 1
    assert at == len(places), "the second reading gave fewer documents"


def _read_known(
    indexes: Sequence[SketchIndex],
    candidates: _Candidates,
    shingles: Shingles,
    names: dict[int, str] | None,
) -> None:
    """Keep the n-grams of candidates of earlier corpora, and their names if asked to."""
    first, number = 0, 0
    for index in indexes:
        for place in candidates.places[number : candidates.known].tolist():
            if place >= first + len(index.ids):
                break
            shingles.add(number, index.shingles(place - first))
            if names is not None:
                names[~number] = index.ids[place - first]
            number += 1
        first += len(index.ids)


def _cluster(
    groups: Iterable[NDArray[np.int64]],
    candidates: _Candidates,
    shingles: Shingles,
    config: DedupConfig,
) -> NearPlaces:
    """Compare the candidates of every group, and return what is found."""
    known, compared = candidates.known, 0
    clusters = Clusters(len(candidates.order))
    similarity = np.full(len(candidates.order), np.nan)
    different: set[tuple[int, int]] = set()  # of some pairs; those that are alike are one cluster

    def similar(first: int, second: int) -> bool:
        nonlocal compared
        if second < known or (first, second) in different:  # or two of earlier corpora
            return False
        compared += 1
        value = jaccard(shingles.read(first), shingles.read(second))
        if value < config.threshold:
            if len(different) == _MOST_REMEMBERED:
                different.clear()
            different.add((first, second))
            return False
        similarity[[first, second]] = np.fmax(similarity[[first, second]], value)
        return True

    for group in groups:
        members = candidates.number(group).tolist()
        join_group(clusters, members, similar if config.verify else None)
    gone, kept = clusters.members()
    gone, kept = gone[gone >= known], kept[gone >= known]
    by_place = np.argsort(candidates.order[gone])
    gone, kept = gone[by_place], kept[by_place]
    places = candidates.order[gone] - candidates.old
    return NearPlaces(places, similarity[gone], kept, compared)

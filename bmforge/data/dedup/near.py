"""Finds near duplicates: MinHash keys, candidate pairs, exact comparison, and clusters.

Two passes over the documents. The first computes the band keys (144 bytes per document at the
default threshold), which may be stored in files; one band at a time is sorted, with an external
sort above a memory bound. The second stores the n-grams of candidates, and their groups, in files.
So memory grows only with the number of candidates (some hundred bytes each). The result does not
depend on the order of the documents.
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
_SIGNED_TOGETHER = 1 << 14  # n-grams
_MOST_REMEMBERED = 1 << 18  # maximum number of pairs remembered as different


@dataclass(frozen=True)
class NearDuplicates:
    """Ids of the near duplicates to drop, with the documents that are kept instead.

    Attributes:
        survivor: dict from the id of a dropped document to the id of the kept one.
        similarity: dict from the id of a dropped document to its similarity to the matched
            document.
        place: dict from the id of a dropped document to its position in the corpus.
        compared: number of pairs that were compared exactly.
    """

    survivor: dict[str, str] = field(default_factory=dict)
    similarity: dict[str, float] = field(default_factory=dict)
    place: dict[str, int] = field(default_factory=dict, compare=False)
    compared: int = 0

    def judge(self, document: Document, threshold: float) -> Document | Drop:
        """Return the document, or a `Drop` if it is a near duplicate."""
        if document.id not in self.survivor:
            return document
        value = self.similarity.get(document.id)
        return Drop(RULE, value, threshold, cut_excerpt(document.text))


class NearPlaces(NamedTuple):
    """Positions in the corpus of the near duplicates to drop.

    `similarity` is NaN if the texts were not compared. `survivors` are the candidate numbers of the
    documents that are kept instead, so they are equal within a cluster.

    Shape: all arrays (D,), sorted by position.
    """

    places: NDArray[np.int64]
    similarity: NDArray[np.float64]
    survivors: NDArray[np.int64]
    compared: int


@dataclass
class Sketches:
    """Band keys and ranking data of a range of documents, from the first pass.

    Shape: keys (N, bands), in Fortran order if mapped from a file; sources, sizes, texts (N,);
    ids (N, 2). A document without words has unique keys.
    """

    keys: Hashes
    sources: NDArray[np.int64]
    sizes: NDArray[np.int64]
    texts: Hashes
    ids: Hashes


def read_sketches(documents: Iterable[Document], hasher: MinHasher) -> Sketches:
    """Compute the band keys and ranking data of documents, for example of one shard."""
    sources, sizes, texts = [], [], []
    ids: list[Hashes] = []
    signed = [np.empty((0, hasher.bands), np.uint64)]
    unsigned: list[Hashes] = []  # n-grams of the last documents, whose keys are not yet computed
    positions, waiting = [], 0
    for document in documents:
        if len(ngrams := hasher.ngrams(document.text)):
            positions.append(len(ids))
            unsigned.append(ngrams)
            waiting += len(ngrams)
        if waiting >= _SIGNED_TOGETHER:
            signed.append(hasher.sketch_all(unsigned))
            unsigned, waiting = [], 0
        sources.append(place_source(document.source, hasher.config.source_order))
        sizes.append(len(document.text))
        texts.append(np.frombuffer(digest_string(document.text), np.uint64)[0])
        ids.append(np.frombuffer(digest_string(document.id), np.uint64))
    if unsigned:
        signed.append(hasher.sketch_all(unsigned))
    all_ids = np.array(ids, np.uint64).reshape(-1, 2)
    # The keys of a document without words are its id, repeated.
    keys = np.resize(all_ids.T, (hasher.bands, len(ids))).T.copy()
    keys[positions] = np.concatenate(signed)
    return Sketches(
        keys,
        np.array(sources, np.int64),
        np.array(sizes, np.int64),
        np.array(texts, np.uint64),
        all_ids,
    )


def find_near_duplicates(
    documents: Callable[[], Iterable[Document]], config: DedupConfig | None = None, **options: Any
) -> NearDuplicates:
    """Find near-duplicate documents; one document of each cluster is kept.

    Args:
        documents: function that returns an iterable of the documents; called twice, and must
            return the same documents in the same order.
        config: settings (default: `DedupConfig()`).
        options: options of `find_near_places` except `names`.
    """
    names: dict[int, str] = {}
    near = find_near_places(documents, config, names=names, **options)
    gone = [names[place_number] for place_number in near.places.tolist()]
    kept_names = [names[~survivor] for survivor in near.survivors.tolist()]
    return NearDuplicates(
        dict(zip(gone, kept_names, strict=True)),
        {
            name: value
            for name, value in zip(gone, near.similarity.tolist(), strict=True)
            if not math.isnan(value)
        },
        dict(zip(gone, near.places.tolist(), strict=True)),
        near.compared,
    )


def find_near_places(
    documents: Callable[[], Iterable[Document]],
    config: DedupConfig | None = None,
    *,
    index_folders: Sequence[str | os.PathLike[str]] = (),
    sketches: Callable[[], Iterable[Sketches]] | None = None,
    shingle: Callable[[str], Hashes] | None = None,
    work_dir: str | os.PathLike[str] | None = None,
    bound_bytes: int = SORT_BYTES,
    names: dict[int, str] | None = None,
) -> NearPlaces:
    """Find near duplicates in bounded memory; return their positions instead of their ids.

    Args:
        documents: function that returns an iterable of the documents; called twice, and must
            return the same documents in the same order.
        config: settings (default: `DedupConfig()`).
        index_folders: folders of `write_index`; documents that repeat one of these corpora are
            dropped.
        sketches: function that returns the precomputed sketches of the shards in order; called once
            per band.
        shingle: function that returns sorted distinct n-gram hashes (default: `hash_shingles`).
        work_dir: folder of temporary files with the keys of a band and the candidates' n-grams.
        bound_bytes: largest size of a band's keys in memory, at 32 bytes per document; if they are
            larger, they are sorted in files.
        names: dict to which the ids of all candidate documents are added. The key is ``~number``
            (bitwise not of the candidate number); a document of this corpus also gets an entry
            with its position as the key.
    """
    config = config or DedupConfig()
    hasher = MinHasher(config, shingle)
    if sketches is None:
        sketched = read_sketches(documents(), hasher)
        sketches = lambda: (sketched,)  # noqa: E731
    indexes = [SketchIndex(Path(folder), hasher) for folder in index_folders]
    old = sum(len(part.ids) for part in indexes)
    with tempfile.TemporaryDirectory(dir=work_dir) as folder:
        groups = Groups(Path(folder), hasher.bands)
        for band in range(hasher.bands):
            keys = chain((part.keys for part in indexes), (part.keys for part in sketches()))
            for group in _equal_groups(keys, band, Path(folder) / "band", bound_bytes, old):
                groups.add(band, *group)
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
    """Yield groups of documents with equal band keys that contain a document of this corpus."""
    rows, first = SortedRows(folder, bound_bytes), 0
    for part in keys:
        new = np.zeros(len(part), ROW)
        new["high"], new["position"] = part[:, band], np.arange(first, first + len(part))
        rows.add(new)
        first += len(part)
    for run in rows:  # rows are sorted, so equal keys are adjacent
        yield equal_groups(run["high"], run["position"], old)
    rows.close()


@dataclass
class _Candidates:
    """Documents that share a band key with another one, and their candidate numbers.

    Documents of earlier corpora are numbered first, then those of this corpus, by rank
    (`rank_documents`).

    Attributes:
        places: sorted positions of all candidates, those in earlier corpora first.
        numbers: candidate number of each position.
        order: positions sorted by candidate number.
        old: number of documents in earlier corpora.
        num_earlier: number of candidates from earlier corpora.
    """

    places: NDArray[np.int64]
    numbers: NDArray[np.int64]
    order: NDArray[np.int64]
    old: int
    num_earlier: int

    @classmethod
    def find(cls, groups: Groups, bands: int, parts: Iterable[Sketches], old: int) -> _Candidates:
        """Collect the candidates of all groups, and rank them by source, size and text."""
        places = np.zeros(0, np.int64)
        for band in range(bands):
            places = np.union1d(places, groups.members(band))
        num_earlier = int(np.searchsorted(places, old))
        numbers = np.arange(len(places))
        numbers[num_earlier:] = num_earlier + _rank(places[num_earlier:] - old, parts)
        order = np.empty_like(places)
        order[numbers] = places
        return cls(places, numbers, order, old, num_earlier)

    def number(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sorted candidate numbers of the documents at the given corpus positions.

        A candidate number is the rank of a document among all near-duplicate candidates.
        """
        return np.sort(self.numbers[np.searchsorted(self.places, places)])


def _rank(places: NDArray[np.int64], parts: Iterable[Sketches]) -> NDArray[np.int64]:
    """Return the ranks (see `rank_documents`) of the documents at sorted positions `places`."""
    count, first = len(places), 0
    sources, sizes = np.empty(count, np.int64), np.empty(count, np.int64)
    texts, ids = np.empty(count, np.uint64), np.empty((count, 2), np.uint64)
    for part in parts:
        span = slice(*np.searchsorted(places, [first, first + len(part.sizes)]))
        inside = places[span] - first
        sources[span], sizes[span] = part.sources[inside], part.sizes[inside]
        texts[span], ids[span] = part.texts[inside], part.ids[inside]
        first += len(part.sizes)
    return rank_documents(sources, sizes, texts, ids)


def _read_candidates(
    documents: Callable[[], Iterable[Document]],
    hasher: MinHasher,
    candidates: _Candidates,
    shingles: Shingles,
    names: dict[int, str] | None,
) -> None:
    """Read the candidates again; store their n-grams, and add their ids to `names`."""
    places = candidates.places[candidates.num_earlier :] - candidates.old
    at = 0
    for position, document in enumerate(documents() if len(places) else ()):
        if at == len(places) or position != places[at]:
            continue
        number = int(candidates.numbers[candidates.num_earlier + at])
        if names is not None:
            names[position] = names[~number] = document.id
        if hasher.config.verify:
            shingles.add(number, hasher.shingle(document.text))
        at += 1
    assert at == len(places), "the second pass read fewer documents than the first"


def _read_known(
    indexes: Sequence[SketchIndex],
    candidates: _Candidates,
    shingles: Shingles,
    names: dict[int, str] | None,
) -> None:
    """Store the n-grams of candidates from earlier corpora, and add their ids to `names`."""
    first, number = 0, 0
    for index in indexes:
        for position in candidates.places[number : candidates.num_earlier].tolist():
            if position >= first + len(index.ids):
                break
            shingles.add(number, index.shingles(position - first))
            if names is not None:
                names[~number] = index.ids[position - first]
            number += 1
        first += len(index.ids)


def _cluster(
    groups: Iterable[NDArray[np.int64]],
    candidates: _Candidates,
    shingles: Shingles,
    config: DedupConfig,
) -> NearPlaces:
    """Compare the candidates of every group, and return the near duplicates."""
    num_earlier, compared = candidates.num_earlier, 0
    clusters = Clusters(len(candidates.order))
    similarity = np.full(len(candidates.order), np.nan)
    different: set[tuple[int, int]] = set()  # pairs compared and found different

    def similar(first: int, second: int) -> bool:
        nonlocal compared
        # Both in earlier corpora, or compared before.
        if second < num_earlier or (first, second) in different:
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
    gone, survivor_numbers = clusters.members()
    gone, survivor_numbers = gone[gone >= num_earlier], survivor_numbers[gone >= num_earlier]
    by_place = np.argsort(candidates.order[gone])
    gone, survivor_numbers = gone[by_place], survivor_numbers[by_place]
    places = candidates.order[gone] - candidates.old
    return NearPlaces(places, similarity[gone], survivor_numbers, compared)

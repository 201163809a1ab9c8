"""Near duplicates across documents: sketches, candidates, exact comparison, clusters.

Two readings of the documents: the first makes sketches (144 bytes a document at the usual
threshold), which may lie in files; one band of them at a time is sorted, through files above a
bound. The second keeps the n-grams of candidates, in a file. So memory grows with the candidates
alone, and nothing depends on the order of the documents.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
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
from bmforge.data.dedup.sort import ROW, SortedRows
from bmforge.data.dedup.tokens import Hashes, digest_string
from bmforge.data.sources.document import Document

__all__ = ["RULE", "NearDuplicates", "Sketches", "find_near_duplicates", "read_sketches"]

RULE = "near_duplicate"
SORT_BYTES = 1 << 28


@dataclass(frozen=True)
class NearDuplicates:
    """Which documents are to be dropped.

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
    sketches: Callable[[], Iterable[Sketches]] | None = None,
    shingle: Callable[[str], Hashes] | None = None,
    work_dir: str | os.PathLike[str] | None = None,
    bound_bytes: int = SORT_BYTES,
) -> NearDuplicates:
    """Find the documents that nearly repeat another one, and which of each cluster survives.

    Args:
        documents: called for each of two readings; both must give the same documents in one order.
        known: folders of `write_index`: what repeats a document there is dropped.
        sketches: of the first reading, where workers have made them: called for each band, and
            gives the parts of the corpus in order.
        shingle: another way to n-gram hashes; it must return them sorted and without repeats.
        work_dir: where files lie meanwhile: a band's keys, the candidates' n-grams.
        bound_bytes: of a band's keys in memory, 32 a document; above it they are sorted in files.
    """
    config = config or DedupConfig()
    hasher = MinHasher(config, shingle)
    if sketches is None:
        made = read_sketches(documents(), hasher)
        sketches = lambda: (made,)  # noqa: E731
    indexes = [SketchIndex(Path(folder), hasher) for folder in known]
    old = sum(len(one.ids) for one in indexes)
    with tempfile.TemporaryDirectory(dir=work_dir) as folder:
        groups = [
            group
            for band in range(hasher.bands)
            for group in _equal_groups(
                chain((one.keys for one in indexes), (one.keys for one in sketches())),
                band,
                Path(folder) / "band",
                bound_bytes,
            )
            if group[-1] >= old
        ]
    places, numbers = _rank_candidates(groups, sketches(), old)
    shingles = _Shingles(work_dir)
    try:
        ids = _read_candidates(documents, hasher, places, numbers, shingles)
        ranked = [_to_numbers(group, old, places, numbers) for group in groups]
        wanted = {int(number) for group in ranked for number in group[group < old]}
        offset = 0
        for one in indexes:
            for place, name in enumerate(one.ids):
                if offset + place in wanted:
                    ids[offset + place] = name
                    shingles.add(offset + place, one.shingles(place))
            offset += len(one.ids)
        found = _cluster(ranked, old, ids, shingles, config)
    finally:
        shingles.close()
    of_id = {ids[int(number)]: int(place) for place, number in zip(places, numbers, strict=True)}
    found.place.update({name: of_id[name] for name in found.survivor})
    return found


def _equal_groups(
    keys: Iterable[Hashes], band: int, folder: Path, bound_bytes: int
) -> Iterator[NDArray[np.int64]]:
    """Yield the places of every two or more documents with one key in a band, sorted."""
    rows, first = SortedRows(folder, bound_bytes), 0
    for part in keys:
        new = np.zeros(len(part), ROW)
        new["high"], new["position"] = part[:, band], np.arange(first, first + len(part))
        rows.add(new)
        first += len(part)
    for found in rows:  # equal keys come together
        if len(found):
            yield from equal_groups(found["high"], found["position"])
    rows.close()


def _rank_candidates(
    groups: Sequence[NDArray[np.int64]], parts: Iterable[Sketches], old: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the places of our candidates, and their numbers, in the order of survival.

    Numbers go on behind those of earlier corpora, which come first.
    """
    joined = np.concatenate(groups) if groups else np.zeros(0, np.int64)
    places = np.unique(joined[joined >= old]) - old
    sources, sizes, texts, ids, first = [], [], [], [], 0
    for part in parts:
        here = places[
            np.searchsorted(places, first) : np.searchsorted(places, first + len(part.sizes))
        ]
        sources.append(part.sources[here - first])
        sizes.append(part.sizes[here - first])
        texts.append(part.texts[here - first])
        ids.append(part.ids[here - first])
        first += len(part.sizes)
    if not len(places):
        return places, places
    ranks = rank_documents(
        np.concatenate(sources), np.concatenate(sizes), np.concatenate(texts), np.concatenate(ids)
    )
    return places, old + ranks


def _to_numbers(
    group: NDArray[np.int64], old: int, places: NDArray[np.int64], numbers: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the numbers of a group, sorted."""
    ours = numbers[np.searchsorted(places, group[group >= old] - old)]
    return np.sort(np.concatenate([group[group < old], ours]))


def _read_candidates(
    documents: Callable[[], Iterable[Document]],
    hasher: MinHasher,
    places: NDArray[np.int64],
    numbers: NDArray[np.int64],
    shingles: _Shingles,
) -> dict[int, str]:
    """Read the documents again; return the ids of candidates, and keep their n-grams."""
    ids: dict[int, str] = {}
    if not len(places):
        return ids
    wanted = iter(zip(places.tolist(), numbers.tolist(), strict=True))
    place, number = next(wanted)
    for here, document in enumerate(documents()):
        if here != place:
            continue
        ids[number] = document.id
        if hasher.config.verify:
            shingles.add(number, hasher.shingle(document.text))
        place, number = next(wanted, (-1, -1))
    assert len(ids) == len(places), "the second reading gave fewer documents"
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

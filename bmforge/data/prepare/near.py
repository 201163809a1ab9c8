"""Drops near duplicates: workers sketch the shards, then one stage clusters all documents.

The clustering stage finds candidate pairs, reads these documents again, and drops all documents of
a cluster but one. The dropped documents are written to a list that the encoding stage reads.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bmforge.data.clean.drop import Drop, cut_excerpt
from bmforge.data.dedup.minhash import DedupConfig, MinHasher
from bmforge.data.dedup.near import RULE as NEAR_DUPLICATE
from bmforge.data.dedup.near import NearPlaces, Sketches, find_near_places, read_sketches
from bmforge.data.prepare.documents import read_digests, read_shard
from bmforge.data.prepare.engine import Beat, StagePart
from bmforge.data.prepare.journal import write_hashed
from bmforge.data.prepare.masks import new_mask, open_mask, read_rows
from bmforge.data.sources.document import Document
from bmforge.errors import ConfigError
from bmforge.prepare_settings import DuplicatesConfig

__all__ = [
    "DROPS",
    "NEAR_DUPLICATE",
    "NearDrops",
    "SketchTask",
    "choose_survivors",
    "dedup_config",
    "sketch_shard",
]

DROPS = "drops"  # file name
_ROW = np.dtype([("position", "<i8"), ("similarity", "<f8")])
_NAMES = tuple(field.name for field in fields(Sketches))


def dedup_config(config: DuplicatesConfig) -> DedupConfig | None:
    """Return the settings of near-duplicate detection, or None if it is off.

    Raises:
        ConfigError: the threshold is out of range.
    """
    if config.near_duplicates is None:
        return None
    try:
        return DedupConfig(threshold=config.near_duplicates)
    except ConfigError as error:
        raise ConfigError(str(error).replace("threshold", "near_duplicates")) from error


@dataclass(frozen=True)
class NearDrops:
    """File with the near duplicates to drop, which `choose_survivors` wrote.

    Attributes:
        path: path of the file.
        threshold: minimum Jaccard similarity of near duplicates.
    """

    path: Path
    threshold: float

    def read(self, first: int, count: int) -> dict[int, float]:
        """Return a dict from position to similarity, for the near duplicates in a range.

        Args:
            first: first position of the range.
            count: number of documents in the range.
        """
        rows = read_rows(self.path, _ROW, first, count)
        return {int(position): float(value) for position, value in rows}

    def describe(self, document: Document, similarity: float) -> Drop:
        """Return a `Drop` that reports a near duplicate and its similarity."""
        value = round(similarity, 4)
        return Drop(NEAR_DUPLICATE, value, self.threshold, cut_excerpt(document.text))


@dataclass(frozen=True)
class SketchTask:
    """Input of a worker that computes the MinHash sketches of a shard.

    Attributes:
        documents: folder of the first stage.
        kept: path of the mask that excludes exact duplicates.
        first: position of the shard's first document.
        folder: output folder of the stage's files.
    """

    number: int
    documents: Path
    kept: Path
    first: int
    folder: Path
    config: DedupConfig


def sketch_shard(part: StagePart, beat: Beat) -> dict[str, Any]:
    """Compute and write the MinHash signatures of a shard's documents, except exact duplicates.

    Returns:
        dict with ``files`` (file names and hashes).
    """
    task: SketchTask = part.task
    skipped = {skip.entry for skip in part.skipped}

    def documents() -> Iterator[Document]:
        mask = open_mask(task.kept)
        for entry, document in enumerate(read_shard(task.documents, task.number)):
            if not mask[task.first + entry]:
                continue
            if entry in skipped:  # kept without comparison
                yield replace(document, text="")
                continue
            beat(entry, False, f"{document.source}:{document.place}")
            yield document

    sketches = read_sketches(documents(), MinHasher(task.config))
    files: dict[str, str] = {}
    for name in _NAMES:
        content, array = io.BytesIO(), getattr(sketches, name)
        # One band of all documents is read at a time, so each band is stored contiguously.
        np.save(content, np.asfortranarray(array), allow_pickle=False)
        with write_hashed(_sketch_file(task.folder, task.number, name), files) as file:
            file.write(content.getvalue())
    return {"files": files}


def _sketch_file(folder: Path, number: int, name: str) -> Path:
    return folder / f"{number:06d}.{name}.npy"


def _map_sketches(folder: Path, number: int) -> Sketches:
    """Memory-map a shard's sketches."""
    return Sketches(*(_map_array(_sketch_file(folder, number, name)) for name in _NAMES))


def _map_array(path: Path) -> NDArray[Any]:
    array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return array


def choose_survivors(
    documents: Path,
    counts: Sequence[int],
    copies: Path,
    sketches: Path,
    config: DedupConfig,
    folder: Path,
    bound_bytes: int,
    index_folders: Sequence[Path] = (),
) -> dict[str, Any]:
    """Find near duplicates; write the mask ``kept`` and the list ``drops``.

    The mask also excludes exact duplicates.

    Args:
        documents: folder of the first stage.
        counts: documents per shard.
        copies: path of the mask that excludes exact duplicates.
        sketches: folder of the shards' sketches.
        config: settings of near-duplicate detection.
        folder: output folder.
        bound_bytes: largest size of a band's keys in memory, in bytes.
        index_folders: folders of sketches of earlier corpora.

    Returns:
        dict with ``files`` (file names and hashes), ``documents`` and ``read_bytes`` (number and
        raw bytes of the dropped documents), ``text_bytes`` (of the remaining documents), and
        ``clusters`` (number of clusters by size).
    """
    before = open_mask(copies)

    def left() -> Iterator[Document]:
        position = 0
        for number in range(len(counts)):
            for document in read_shard(documents, number):
                if before[position]:
                    yield document
                position += 1

    folder.mkdir(parents=True, exist_ok=True)
    near = find_near_places(
        left,
        config,
        index_folders=index_folders,
        sketches=lambda: (_map_sketches(sketches, number) for number in range(len(counts))),
        work_dir=folder,
        bound_bytes=bound_bytes,
    )
    drops = _locate(near, before, counts)
    files: dict[str, str] = {}
    with write_hashed(folder / DROPS, files) as file:
        file.write(drops.tobytes())
    with new_mask(folder, "kept", len(before), files) as mask:
        mask[:] = before
        mask[drops["position"]] = False
        read_bytes, text_bytes, first = 0, 0, 0
        for number, count in enumerate(counts):
            sizes = read_digests(documents, number)
            span = slice(first, first + count)
            text_bytes += int(sizes["text_bytes"][mask[span]].sum())
            read_bytes += int(sizes["read_bytes"][before[span] & ~mask[span]].sum())
            first += count
    result = {"documents": len(drops), "read_bytes": read_bytes, "text_bytes": text_bytes}
    gone = np.unique(near.survivors, return_counts=True)[1]
    sizes, of_size = np.unique(1 + gone, return_counts=True)
    clusters = {str(size): [count] for size, count in zip(sizes, of_size.tolist(), strict=True)}
    return {"files": files, "clusters": clusters, **result}


def _locate(
    near: NearPlaces, compared: NDArray[np.bool_], counts: Sequence[int]
) -> NDArray[np.void]:
    """Return the corpus position and similarity of each dropped document, sorted by position.

    Args:
        near: dropped documents; their positions are those among the compared documents only.
        compared: mask of the documents that were compared.
        counts: documents per shard.
    """
    drops = np.empty(len(near.places), _ROW)
    drops["position"], drops["similarity"] = near.places, near.similarity
    first, seen = 0, 0
    for count in counts:
        compared_places = np.flatnonzero(compared[first : first + count])
        part = slice(*np.searchsorted(near.places, [seen, seen + len(compared_places)]))
        drops["position"][part] = first + compared_places[near.places[part] - seen]
        first, seen = first + count, seen + len(compared_places)
    return drops

"""Index of a corpus's texts, used to drop the same documents from later corpora.

``index/digests.bin`` has the digest of every text, sorted; ``index/near/`` has the sketches and
n-grams of `dedup.index` if near duplicates were searched.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bmforge.data.dedup.index import write_index
from bmforge.data.dedup.minhash import DedupConfig
from bmforge.data.dedup.sort import SortedRows, make_rows
from bmforge.data.prepare.documents import read_digests, read_shard
from bmforge.data.prepare.journal import digest_file
from bmforge.data.prepare.masks import open_mask
from bmforge.data.sources.document import Document
from bmforge.errors import ConfigError, DataError

__all__ = ["INDEX", "CorpusIndex", "open_corpus_indexes", "write_corpus_index"]

INDEX = "index"  # folder name
_DIGESTS, _SETTINGS, _NEAR = "digests.bin", "index.json", "near"
_FORMAT = 1
_ROW = np.dtype([("high", "<u8"), ("low", "<u8")])


@dataclass(frozen=True)
class CorpusIndex:
    """Index of the texts of an earlier corpus.

    Attributes:
        folder: folder of the index.
        digest: hash of the whole index.
    """

    folder: Path
    digest: str

    @property
    def near(self) -> Path:
        """Folder of the index for near duplicates; None if there is none."""
        return self.folder / _NEAR

    def holds(self, rows: NDArray[np.void]) -> NDArray[np.bool_]:
        """Return a mask of the rows (`dedup.sort.ROW`) whose text occurs in the earlier corpus."""
        digests = np.memmap(self.folder / _DIGESTS, dtype=_ROW, mode="r")
        holds = np.zeros(len(rows), dtype=np.bool_)
        first = np.searchsorted(digests["high"], rows["high"], side="left")
        last = np.searchsorted(digests["high"], rows["high"], side="right")
        for index in np.flatnonzero(last > first).tolist():
            part = digests["low"][first[index] : last[index]]
            holds[index] = bool((part == rows["low"][index]).any())
        return holds


def open_corpus_indexes(
    corpora: Sequence[str], near: DedupConfig | None
) -> tuple[CorpusIndex, ...]:
    """Open the indexes of earlier prepared corpora.

    Raises:
        ConfigError: a directory has no index, or no near-duplicate index although `near` is given.
        DataError: an index is damaged.
    """
    indexes = []
    for corpus in corpora:
        folder = Path(corpus) / INDEX
        if not (folder / _SETTINGS).is_file():
            raise ConfigError(
                f"earlier={corpus!r} has no index. Prepare the corpus again with keep_index=True "
                "(--keep-index)."
            )
        try:
            settings = json.loads((folder / _SETTINGS).read_text("utf-8"))
            if settings["format"] != _FORMAT:
                raise ValueError(
                    f"format {settings['format']} is not the supported format {_FORMAT}"
                )
            if digest_file(folder / _DIGESTS) != settings["digest"]:
                raise ValueError(f"the content of {_DIGESTS} does not match its checksum")
            threshold = settings["near_duplicates"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"the index {str(folder)!r} is damaged ({error}). Prepare {corpus!r} again."
            ) from (error)
        if near is not None and threshold != near.threshold:
            raise ConfigError(
                f"near_duplicates={near.threshold} differs from the index of "
                f"earlier={corpus!r}, which was built with {threshold}. Use the same value, or "
                "prepare the earlier corpus again."
            )
        indexes.append(CorpusIndex(folder, digest_file(folder / _SETTINGS)))
    return tuple(indexes)


def write_corpus_index(
    finished: Path,
    documents: Path,
    counts: Sequence[int],
    mask_path: Path,
    near: DedupConfig | None,
    bound_bytes: int,
) -> None:
    """Write the index of the kept documents, for later runs of `prepare`.

    Args:
        finished: temporary folder in which the corpus is assembled.
        documents: folder of the first stage.
        counts: documents per shard.
        mask_path: path of the mask of kept documents.
        near: settings of near-duplicate detection; None to write no sketches.
        bound_bytes: largest size of the digests in memory, in bytes.
    """
    mask, folder = open_mask(mask_path), finished / INDEX
    folder.mkdir()
    rows, first = SortedRows(folder / "rows", bound_bytes), 0
    for number, count in enumerate(counts):
        digests = read_digests(documents, number)
        places = np.flatnonzero(mask[first : first + count])
        rows.add(make_rows(digests["digest"][places].tobytes(), first + places, places * 0))
        first += count
    with (folder / _DIGESTS).open("wb") as file:
        for part in rows:
            sorted_ = np.empty(len(part), dtype=_ROW)
            sorted_["high"], sorted_["low"] = part["high"], part["low"]
            file.write(sorted_.tobytes())
    rows.close()

    def texts() -> Iterator[Document]:
        position = 0
        for number in range(len(counts)):
            for document in read_shard(documents, number):
                if mask[position]:
                    yield document
                position += 1

    if near is not None:
        write_index(folder / _NEAR, texts(), near)
    settings = {
        "format": _FORMAT,
        "digest": digest_file(folder / _DIGESTS),
        "near_duplicates": None if near is None else near.threshold,
    }
    (folder / _SETTINGS).write_text(json.dumps(settings) + "\n", encoding="utf-8")

"""On-disk index of a corpus's MinHash keys and n-grams, for deduplicating later corpora."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from bmforge.data.dedup.minhash import DedupConfig, MinHasher
from bmforge.data.dedup.tokens import Hashes
from bmforge.data.sources.document import Document
from bmforge.errors import ConfigError, DataError

__all__ = ["SketchIndex", "write_index"]

_SETTINGS = "index.json"  # written last: a folder without this file is incomplete
_FORMAT = 1


def write_index(
    folder: str | os.PathLike[str],
    documents: Iterable[Document],
    config: DedupConfig | None = None,
) -> int:
    """Write the index of the kept documents; return their number.

    The index is about as large as the text: 8 bytes for each distinct n-gram.

    Raises:
        ConfigError: the folder has an index already.
    """
    config = config or DedupConfig()
    hasher, folder = MinHasher(config), Path(folder)
    if (folder / _SETTINGS).exists():
        raise ConfigError(
            f"folder={str(folder)!r} already contains an index. Choose another directory."
        )
    folder.mkdir(parents=True, exist_ok=True)
    ids, keys, ends = [], [], [0]
    with (folder / "shingles.bin").open("wb") as file:
        for document in documents:
            shingles = hasher.shingle(document.text)
            if len(shingles):
                file.write(shingles.astype("<u8").tobytes())
                ids.append(document.id)
                keys.append(hasher.sketch(shingles))
                ends.append(ends[-1] + len(shingles))
    np.save(folder / "keys.npy", np.array(keys, "<u8").reshape(-1, hasher.bands))
    np.save(folder / "ends.npy", np.array(ends, "<i8"))
    (folder / "ids.json").write_text(json.dumps(ids), encoding="utf-8")
    settings = {"format": _FORMAT, **_settings_of(config)}
    (folder / _SETTINGS).write_text(json.dumps(settings), encoding="utf-8")
    return len(ids)


def _settings_of(config: DedupConfig) -> dict[str, float]:
    """Return the settings that must be equal for two indexes to be comparable."""
    return {
        "threshold": config.threshold,
        "ngram": config.ngram,
        "hashes": config.hashes,
        "seed": config.seed,
    }


class SketchIndex:
    """Index of an earlier corpus, read from a folder that `write_index` wrote.

    Raises:
        DataError: the index is incomplete, or one of its files is too short.
        ConfigError: the index was built with settings that differ from those of `hasher`.
    """

    def __init__(self, folder: Path, hasher: MinHasher) -> None:
        try:
            settings = json.loads((folder / _SETTINGS).read_text("utf-8"))
            self.ids: list[str] = json.loads((folder / "ids.json").read_text("utf-8"))
            self.keys: Hashes = np.load(folder / "keys.npy", allow_pickle=False)
            self._ends = np.load(folder / "ends.npy", allow_pickle=False)
            size = (folder / "shingles.bin").stat().st_size
        except (OSError, ValueError) as error:
            raise DataError(
                f"{str(folder)!r} does not contain a complete index ({error}). Build the index "
                "again."
            ) from error
        needed = {"format": _FORMAT, **_settings_of(hasher.config)}
        if settings != needed:
            raise ConfigError(
                f"the index {str(folder)!r} was built with {settings}, but {needed} was "
                "requested. Use the settings of the index, or build the index again."
            )
        if len(self.ids) + 1 != len(self._ends) or int(self._ends[-1]) * 8 != size:
            raise DataError(f"the index {str(folder)!r} is truncated. Build the index again.")
        self._path = folder / "shingles.bin"

    def shingles(self, number: int) -> Hashes:
        """Return the n-gram hashes of one document."""
        start, end = int(self._ends[number]), int(self._ends[number + 1])
        with self._path.open("rb") as file:
            file.seek(start * 8)
            return np.frombuffer(file.read((end - start) * 8), "<u8")

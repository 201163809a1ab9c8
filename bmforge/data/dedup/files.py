"""Temporary files for near-duplicate detection, which keep its memory use bounded."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bmforge.data.dedup.tokens import Hashes

__all__ = ["Groups", "Shingles"]


class Shingles:
    """Temporary file with the n-gram hashes of the candidate documents.

    Args:
        count: number of candidates, which are numbered from 0.
        folder: folder of the file.
    """

    def __init__(self, count: int, folder: str | os.PathLike[str] | None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._starts, self._counts = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self._end = 0

    def add(self, number: int, shingles: Hashes) -> None:
        """Append the hashes of one document."""
        self._file.seek(self._end)
        self._file.write(shingles.tobytes())
        self._starts[number], self._counts[number] = self._end, len(shingles)
        self._end += len(shingles) * 8

    def read(self, number: int) -> Hashes:
        """Return the hashes of one document."""
        self._file.seek(self._starts[number])
        return np.frombuffer(self._file.read(int(self._counts[number]) * 8), np.uint64)

    def close(self) -> None:
        """Close and delete the temporary file."""
        self._file.close()


class Groups:
    """Groups of documents that share a MinHash key, stored in two files per band.

    Args:
        folder: folder of the files.
        bands: number of bands.
    """

    def __init__(self, folder: Path, bands: int) -> None:
        self._folder, self._bands = folder, bands

    def add(self, band: int, members: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        """Append groups of documents to the files of a band."""
        for name, array in (("members", members), ("sizes", sizes)):
            with self._path(band, name).open("ab") as file:
                file.write(array.tobytes())

    def members(self, band: int) -> NDArray[np.int64]:
        """Return the document positions in all groups of a band, concatenated."""
        return self._read(band, "members")

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        """Yield the document positions of every group, band by band."""
        for band in range(self._bands):
            members, first = self.members(band), 0
            for size in self._read(band, "sizes").tolist():
                yield members[first : first + size]
                first += size

    def _read(self, band: int, name: str) -> NDArray[np.int64]:
        path = self._path(band, name)
        return np.fromfile(path, np.int64) if path.exists() else np.zeros(0, np.int64)

    def _path(self, band: int, name: str) -> Path:
        return self._folder / f"{band}.{name}"

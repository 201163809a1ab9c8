"""Temporary files of the duplicate detection, which keep its memory use bounded."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bmforge.data.dedup.tokens import Hashes

__all__ = ["Groups", "RepeatedItems", "Shingles"]

_RANGES = 256  # largest number of files of `RepeatedItems`
_SMALLEST_RANGE = 1 << 20
_READ_BYTES = 1 << 16


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
        """Append the n-gram hashes of one document."""
        self._file.seek(self._end)
        self._file.write(shingles.tobytes())
        self._starts[number], self._counts[number] = self._end, len(shingles)
        self._end += len(shingles) * 8

    def read(self, number: int) -> Hashes:
        """Return the n-gram hashes of one document."""
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


class RepeatedItems:
    """Indices of the repeated items (tokens or paragraphs) of each document, in temporary files.

    First call `add_document` for all documents in order, then `add_repeated` with the positions of
    repeated items in the concatenation of all documents, in any order. Iteration then yields, for
    each document, a sorted array of the indices of its repeated items.

    Args:
        folder: folder of the files.

    Memory: the repeated items in the largest of up to 256 files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._total = folder, 0
        folder.mkdir(parents=True, exist_ok=True)
        self._ends = (folder / "ends").open("wb")

    def add_document(self, num_items: int) -> int:
        """Add the next document; return the position of its first item in the concatenation."""
        first = self._total
        self._total += num_items
        self._ends.write(self._total.to_bytes(8, "little"))
        return first

    def add_repeated(self, positions: NDArray[np.int64]) -> None:
        """Add the positions of repeated items; call it after all calls of `add_document`."""
        self._ends.close()
        positions = np.sort(positions)
        edges = np.searchsorted(positions, np.arange(0, self._total + self._width, self._width))
        for number in np.flatnonzero(np.diff(edges)).tolist():
            with (self._folder / str(number)).open("ab") as file:
                file.write(positions[edges[number] : edges[number + 1]].tobytes())

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        """Yield the sorted indices of the repeated items of each document."""
        self._ends.close()
        positions, loaded, first = np.zeros(0, np.int64), 0, 0
        for end in self._read_ends():
            while loaded * self._width < end:
                path = self._folder / str(loaded)
                if path.exists():
                    positions = np.concatenate([positions, np.sort(np.fromfile(path, np.int64))])
                loaded += 1
            count = int(np.searchsorted(positions, end))
            yield positions[:count] - first
            positions, first = positions[count:], end

    @property
    def _width(self) -> int:
        """Number of positions whose repeated items are in the same file."""
        return max(_SMALLEST_RANGE, -(-self._total // _RANGES))

    def _read_ends(self) -> Iterator[int]:
        with (self._folder / "ends").open("rb") as file:
            while data := file.read(_READ_BYTES):
                yield from np.frombuffer(data, "<i8").tolist()

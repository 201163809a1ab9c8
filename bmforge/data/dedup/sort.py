"""External sort of rows that begin with a 128-bit key, in memory or through files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["ROW", "SortedRows", "make_rows"]

ROW = np.dtype([("high", "<u8"), ("low", "<u8"), ("position", "<i8"), ("size_bytes", "<i8")])
_BUCKETS = 256  # one per first byte of the key; keys are hashes, so buckets fill evenly


def make_rows(
    keys: Sequence[bytes] | bytes, positions: NDArray[np.int64], sizes_bytes: NDArray[np.int64]
) -> NDArray[np.void]:
    """Build the rows to sort from keys, positions and sizes.

    Args:
        keys: 16-byte keys, as a list or concatenated.
        positions, sizes_bytes: one value per key.
    """
    joined = keys if isinstance(keys, bytes) else b"".join(keys)
    halves = np.frombuffer(joined, dtype=">u8").reshape(-1, 2)
    rows = np.empty(len(halves), dtype=ROW)
    rows["high"], rows["low"] = halves[:, 0], halves[:, 1]
    rows["position"], rows["size_bytes"] = positions, sizes_bytes
    return rows


class SortedRows:
    """Collects rows in any order, and yields them sorted by key, then position.

    Args:
        folder: folder of temporary files, created and removed here; None to keep all rows in
            memory.
        bound_bytes: largest size of rows in memory, in bytes. Larger data is written to 256 files
            by the first byte of the keys, and one file is sorted at a time.
        row: dtype of the rows, whose first field is ``high``.
        by: names of the fields to sort by.

    Memory: twice the bound, or twice the largest file.
    """

    def __init__(
        self,
        folder: Path | None,
        bound_bytes: int,
        row: np.dtype[np.void] = ROW,
        by: Sequence[str] = ("high", "low", "position"),
    ) -> None:
        self._folder, self._bound_bytes, self._row, self._by = folder, bound_bytes, row, by
        self._held: list[NDArray[np.void]] = []
        self._held_bytes = 0
        self._is_spilled = False
        self.close()

    def add(self, rows: NDArray[np.void]) -> None:
        """Add rows to the collection; write them to files if they exceed the memory bound."""
        self._held.append(rows)
        self._held_bytes += rows.nbytes
        if self._held_bytes > self._bound_bytes:
            self._spill()

    def __iter__(self) -> Iterator[NDArray[np.void]]:
        """Yield arrays of rows in sorted order; may be called more than once."""
        if not self._is_spilled:
            self._held = [self._sort(np.concatenate(self._held))] if self._held else []
            yield from self._held
            return
        self._spill()
        for bucket in range(_BUCKETS):
            if (path := self._path(bucket)).exists():
                yield self._sort(np.fromfile(path, dtype=self._row))

    def close(self) -> None:
        """Remove the temporary files."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _sort(self, rows: NDArray[np.void]) -> NDArray[np.void]:
        return rows[np.lexsort([rows[name] for name in reversed(self._by)])]

    def _path(self, bucket: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{bucket:02x}"

    def _spill(self) -> None:
        if not self._held:
            return
        assert self._folder is not None
        rows = np.concatenate(self._held)
        bucket = (rows["high"] >> np.uint64(56)).astype(np.int64)
        order = np.argsort(bucket, kind="stable")
        rows, edges = rows[order], np.searchsorted(bucket[order], np.arange(_BUCKETS + 1))
        self._folder.mkdir(parents=True, exist_ok=True)
        for number in range(_BUCKETS):
            part = rows[edges[number] : edges[number + 1]]
            if len(part):
                with self._path(number).open("ab") as file:
                    file.write(part.tobytes())
        self._held, self._held_bytes, self._is_spilled = [], 0, True

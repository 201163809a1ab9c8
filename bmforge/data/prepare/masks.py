"""Memory-mapped masks with one byte per document, and tables that are sorted by document."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bmforge.data.prepare.journal import digest_file
from bmforge.files import sync_directory

__all__ = ["new_mask", "open_mask", "read_rows"]


@contextmanager
def new_mask(
    folder: Path, name: str, total: int, files: dict[str, str]
) -> Iterator[NDArray[np.bool_]]:
    """Create a memory-mapped mask with one byte per document; sync and rename the file on exit."""
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / f"{name}.{os.getpid()}.partial"
    mask = np.memmap(beside, dtype=np.bool_, mode="w+", shape=(total,))
    yield mask
    mask.flush()
    with beside.open("rb") as file:
        os.fsync(file.fileno())
    files[name] = digest_file(beside)
    os.replace(beside, folder / name)
    sync_directory(folder)


def open_mask(path: Path) -> NDArray[np.bool_]:
    """Memory-map a finished mask for reading."""
    return np.memmap(path, dtype=np.bool_, mode="r").view(np.ndarray)


def read_rows(path: Path, row: np.dtype[np.void], first: int, count: int) -> NDArray[np.void]:
    """Return the rows of a range of documents, from a file that is sorted by ``position``.

    Args:
        path: path of the file.
        row: dtype of the rows.
        first: first position of the range.
        count: number of documents in the range.
    """
    if not path.stat().st_size:  # an empty file cannot be mapped
        return np.empty(0, row)
    rows = np.memmap(path, row, "r")
    return np.array(rows[slice(*np.searchsorted(rows["position"], [first, first + count]))])

"""Memory-mapped masks with one byte per document, for example of the kept documents."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bmforge.data.prepare.journal import digest_file
from bmforge.files import sync_directory

__all__ = ["new_mask", "open_mask"]


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

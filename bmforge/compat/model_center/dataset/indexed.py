"""Memory-mapped corpora (`.bin` and `.idx`) under ModelCenter's names, using `TokenStore`."""

from __future__ import annotations

import os
from bisect import bisect_right
from typing import Any

from bmforge.data import TokenStore
from bmforge.data.store.token_store import store_paths
from bmforge.errors import DataError

__all__ = ["DistributedMMapIndexedDataset", "MMapIndexedDataset"]


class MMapIndexedDataset(TokenStore):
    """Sequences of one corpus as token arrays; see `TokenStore`.

    Args:
        path: path of the corpus without `.bin` or `.idx`.
    """

    @staticmethod
    def exists(path: str) -> bool:
        """Return True if both files of a corpus exist."""
        return all(file.is_file() for file in store_paths(path))


class DistributedMMapIndexedDataset:
    """This process's part of a corpus of several files, `NAME_0`, `NAME_1`, ...

    Each process has a contiguous part of every file.

    Args:
        path: prefix before the name, such as a folder with its "/".
        name: file name without "_0".
        rank: rank of the process.
        world_size: number of processes.
    """

    def __init__(
        self,
        path: str,
        name: str,
        rank_number: int = 0,
        rank_total: int = 1,
        cache: Any = None,
    ) -> None:
        self.stores: list[MMapIndexedDataset] = []
        self.starts: list[int] = []
        self.ends = [0]  # cumulative number of this process's sequences per file
        prefix = os.path.join(path, name) if os.path.isdir(path) else path + name
        while MMapIndexedDataset.exists(f"{prefix}_{len(self.stores)}"):
            store = MMapIndexedDataset(f"{prefix}_{len(self.stores)}")
            first, last = (len(store) * n // rank_total for n in (rank_number, rank_number + 1))
            self.stores.append(store)
            self.starts.append(first)
            self.ends.append(self.ends[-1] + last - first)
        if not self.stores:
            raise DataError(
                f"the corpus {prefix}_0 (.bin and .idx) does not exist. Check path and name."
            )

    def __len__(self) -> int:
        """Return the number of this process's sequences."""
        return self.ends[-1]

    def __getitem__(self, index: int | slice) -> Any:
        """Return one sequence, or the list of sequences of a slice with step 1."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise IndexError(f"a slice with step {step} is not supported. Use step 1.")
            return [self[n] for n in range(start, stop)]
        if not -len(self) <= index < len(self):
            raise IndexError(
                f"sequence {index} is out of range, because this process has {len(self)} sequences."
            )
        index %= len(self)
        file = bisect_right(self.ends, index) - 1
        return self.stores[file].get(self.starts[file] + index - self.ends[file])

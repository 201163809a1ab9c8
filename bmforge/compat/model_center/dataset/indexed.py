"""Memory-mapped corpora (`.bin` and `.idx`) under ModelCenter's and Megatron's names.

They use `TokenStore`. Every `impl` writes and opens the same memory-mapped format. An existing
store is never replaced.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from typing import Any

import numpy as np

from bmforge.data import TokenStore, TokenStoreWriter
from bmforge.data.store.token_store import store_paths
from bmforge.data.store.writer import best_dtype
from bmforge.errors import ConfigError, DataError

__all__ = [
    "DistributedMMapIndexedDataset", "MMapIndexedDataset", "MMapIndexedDatasetBuilder",
    "best_fitting_dtype", "data_file_path", "dataset_exists", "get_available_dataset_impl",
    "index_file_path", "infer_dataset_impl", "make_builder", "make_dataset",
]  # fmt: skip


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
        self, path: str, name: str, rank_number: int = 0, rank_total: int = 1, cache: Any = None
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
                f"the corpus {prefix}_0 (.bin and .idx) does not exist. Check the path and the "
                "name."
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


_KINDS = ("lazy", "cached", "mmap")
_OLD_MAGIC = b"TNTIDX\x00\x00"


def get_available_dataset_impl() -> list[str]:
    """Return the accepted values of `impl`."""
    return list(_KINDS)


def best_fitting_dtype(vocab_size: int | None = None) -> Any:
    """Return numpy's token dtype: uint16 for a vocabulary below 65500, else int32."""
    return best_dtype(vocab_size).type


def index_file_path(prefix_path: str) -> str:
    """Return the path of a store's index."""
    return f"{prefix_path}.idx"


def data_file_path(prefix_path: str) -> str:
    """Return the path of a store's tokens."""
    return f"{prefix_path}.bin"


def dataset_exists(path: str, impl: str = "mmap") -> bool:
    """Return True if both files of a token store exist."""
    _check(impl)
    return MMapIndexedDataset.exists(path)


def infer_dataset_impl(path: str) -> str | None:
    """Return "mmap" for a token store, "cached" for a store in the older format, else None."""
    if not MMapIndexedDataset.exists(path):
        return None
    with open(index_file_path(path), "rb") as file:
        magic = file.read(9)
    if magic.startswith(_OLD_MAGIC):
        return "cached"
    return "mmap" if magic == b"MMIDIDX\x00\x00" else None


def make_dataset(path: str, impl: str = "infer", skip_warmup: bool = False) -> MMapIndexedDataset:
    """Open a token store.

    Args:
        path: path without `.bin` or `.idx`.
        impl: "infer", or a value of `get_available_dataset_impl()`; all open the same format.
        skip_warmup: accepted and ignored; pages are read on demand.

    Raises:
        DataError: the store is missing, or has the older format (its index begins with TNTIDX).
    """
    if impl != "infer":
        _check(impl)
    if infer_dataset_impl(path) == "cached":
        raise DataError(
            f"{index_file_path(path)!r} has the older format (TNTIDX), which is not supported. "
            "Build the corpus again with --dataset_impl mmap."
        )
    return MMapIndexedDataset(path)


class MMapIndexedDatasetBuilder:
    """Writes a token store item by item.

    Args:
        out_file: path of the `.bin` file.
        dtype: numpy dtype of the tokens.

    Raises:
        ConfigError: the name does not end in `.bin`, or the store exists.
    """

    def __init__(self, out_file: str | os.PathLike[str], dtype: Any = np.int64) -> None:
        path = os.fspath(out_file)
        if not path.endswith(".bin"):
            raise ConfigError(f"{path!r} must end in .bin.")
        self._prefix = path.removesuffix(".bin")
        self._writer = TokenStoreWriter(self._prefix, np.dtype(dtype))

    def add_item(self, tensor: Any) -> None:
        """Append one sequence of ids: a tensor, an array or a list."""
        self._writer.add_item(np.asarray(tensor).reshape(-1))

    def end_document(self) -> None:
        """Mark the items since the last call as one document."""
        self._writer.end_document()

    def merge_file_(self, another_file: str) -> None:
        """Append all sequences of another token store."""
        self._writer.add_store(TokenStore(another_file))

    def finalize(self, index_file: str | os.PathLike[str]) -> None:
        """Write the index of the token store.

        Raises:
            ConfigError: the path of the index is not the path of the token file with the suffix
                `.idx`.
        """
        if os.fspath(index_file) != index_file_path(self._prefix):
            raise ConfigError(
                f"index_file={os.fspath(index_file)!r} is not the index file of this token file "
                f"(needed: {index_file_path(self._prefix)!r})."
            )
        self._writer.finalize()


def make_builder(
    out_file: str | os.PathLike[str], impl: str = "mmap", dtype: Any = np.int32
) -> MMapIndexedDatasetBuilder:
    """Return a store writer; every `impl` writes the same format."""
    _check(impl)
    return MMapIndexedDatasetBuilder(out_file, dtype)


def _check(impl: str) -> None:
    if impl not in _KINDS:
        raise ConfigError(f"impl={impl!r} must be one of {', '.join(_KINDS)}.")

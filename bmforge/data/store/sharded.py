"""Reads many token stores as one; the file ``PREFIX.shards`` lists them.

Each shard is a complete store that Megatron-LM can read. Nothing is copied: a corpus that the
processes of a cluster wrote in parts is read from where they wrote it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from bmforge.data.store.lazy import ConcatenatedArray
from bmforge.data.store.token_store import TokenStore, store_paths
from bmforge.errors import ConfigError, DataError
from bmforge.files import replace_file

__all__ = ["ShardedStore", "has_store", "open_store", "shards_path", "write_shard_list"]

_FORMAT = 1


def shards_path(prefix: str | os.PathLike[str]) -> Path:
    """Return the path of the list of shards, ``PREFIX.shards``."""
    return Path(os.fspath(prefix) + ".shards")


def has_store(prefix: str | os.PathLike[str]) -> bool:
    """Return True if a single or sharded token store exists at `prefix`."""
    return store_paths(prefix)[1].is_file() or shards_path(prefix).is_file()


def open_store(prefix: str | os.PathLike[str]) -> TokenStore:
    """Open a single or sharded token store.

    Raises:
        DataError: a file is missing, not a token store, damaged, or cut off.
    """
    if shards_path(prefix).is_file() and not store_paths(prefix)[1].is_file():
        return ShardedStore(prefix)
    return TokenStore(prefix)


def write_shard_list(
    prefix: str | os.PathLike[str], shards: Sequence[str | os.PathLike[str]]
) -> None:
    """Write the list of a sharded store's shards.

    Args:
        prefix: path of the sharded store without ``.shards``.
        shards: prefixes of the shards, in order; in the same directory as `prefix` or below.

    Raises:
        ConfigError: the list is empty, or a shard is named twice or in another directory.
        DataError: a shard cannot be opened.
    """
    path = shards_path(prefix)
    names = []
    for shard in shards:
        try:
            names.append(Path(shard).absolute().relative_to(path.absolute().parent).as_posix())
        except ValueError as error:
            raise ConfigError(
                f"shard {str(shard)!r} is not in the directory of {str(path)!r} or below it. "
                "Move the shard there."
            ) from error
    if not names or len(set(names)) != len(names):
        raise ConfigError(
            f"shards={names} must contain at least one shard, and each shard only once."
        )
    entries = [
        {"name": name, "tokens": store.num_tokens, "sequences": len(store)}
        for name, store in zip(names, map(TokenStore, shards), strict=True)
    ]
    record = {"format": _FORMAT, "shards": entries}
    replace_file(path, json.dumps(record, indent=1) + "\n")


class ShardedStore(TokenStore):
    """Many token stores opened as one; the arrays of `TokenStore` are lazy concatenations.

    Args:
        prefix: path of the list without ``.shards``.

    Attributes:
        shards: the stores, in order.

    Raises:
        DataError: the list or a store is missing or damaged, or the size of a store differs from
            the list.

    Memory: a few kB per shard.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = Path(prefix)
        self.shards = _open_all(shards_path(prefix))
        self.dtype = np.result_type(*(store.dtype for store in self.shards))
        self.tokens: Any = ConcatenatedArray([store.tokens for store in self.shards], self.dtype)
        self.sizes: Any = ConcatenatedArray([store.sizes for store in self.shards], np.int32)
        before = [0, *accumulate(store.num_tokens for store in self.shards)]
        self.pointers: Any = _Pointers(self.shards, before, self.dtype.itemsize)
        first = [0, *accumulate(len(store) for store in self.shards)]
        marks = [_marks(store) for store in self.shards]
        parts = [marks[0], *(part[1:] for part in marks[1:])]
        self.doc_idx: Any = ConcatenatedArray(parts, np.int64, first[:-1])

    def map_for_random_access(self) -> Any:
        """Return a second memory mapping of `tokens`, for reading short spans in random order."""
        return ConcatenatedArray(
            [store.map_for_random_access() for store in self.shards], self.dtype
        )


class _Pointers(ConcatenatedArray):
    """Byte offsets of all sequences, as if all shards' tokens were concatenated in one dtype."""

    def __init__(self, stores: Sequence[TokenStore], before: Sequence[int], width: int) -> None:
        super().__init__([store.pointers for store in stores], np.int64)
        self._widths = [store.dtype.itemsize for store in stores]
        self._before, self._width = before, width

    def _moved(self, values: Any, number: int) -> Any:
        places = values.astype(np.int64) // self._widths[number] + self._before[number]
        return places * self._width


def _marks(store: TokenStore) -> Any:
    """Return the index of each document's first sequence, then the number of sequences."""
    marks = store.doc_idx
    if not len(marks):
        return np.array([0, len(store)] if len(store) else [0], dtype=np.int64)
    return marks if int(marks[-1]) == len(store) else np.append(marks, len(store))


def _open_all(path: Path) -> list[TokenStore]:
    try:
        record = json.loads(path.read_text("utf-8"))
        if record["format"] != _FORMAT:
            raise ValueError(f"format {record['format']} is not the supported format {_FORMAT}")
        entries = [(e["name"], int(e["tokens"]), int(e["sequences"])) for e in record["shards"]]
        if not entries or any(Path(name).is_absolute() or ".." in name for name, *_ in entries):
            raise ValueError("the list is empty, or contains a shard outside of the directory")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{str(path)!r} is not a list of shards ({error}). Copy or write the file again."
        ) from error
    stores = []
    for name, tokens, sequences in entries:
        store = TokenStore(path.parent / name)
        if (store.num_tokens, len(store)) != (tokens, sequences):
            raise DataError(
                f"shard {str(path.parent / name)!r} has {store.num_tokens} tokens in "
                f"{len(store)} sequences, but {str(path)!r} states {tokens} in "
                f"{sequences}. Copy both files again."
            )
        stores.append(store)
    return stores

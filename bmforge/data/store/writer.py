"""Writes and merges token stores; files get their final names only when they are complete."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from bmforge.data.store.token_store import DTYPE_CODES, HEADER, MAGIC, TokenStore, store_paths
from bmforge.errors import ConfigError, DataError

__all__ = ["TokenStoreWriter", "best_dtype", "merge_stores"]

_COPY_TOKENS = 1 << 20
_U16_VOCABULARY = 65500


def best_dtype(vocab_size: int | None) -> np.dtype[np.integer]:
    """Return the smallest token dtype: uint16 for a vocabulary below 65500, else int32.

    65500 is Megatron-LM's limit.
    """
    small = vocab_size is not None and vocab_size < _U16_VOCABULARY
    return np.dtype("<u2" if small else "<i4")


class TokenStoreWriter:
    """Writes a token store sequence by sequence; a context manager, finalized on a clean exit.

    Args:
        prefix: path of the store without ``.bin`` or ``.idx``; folders are created.
        dtype: integer type of the tokens (default: chosen from `vocab_size`).
        vocab_size: vocabulary size, if `dtype` is not given.
        overwrite: True to replace an existing store.

    Raises:
        ConfigError: a store exists already, or the layout does not support the dtype.

    Memory: 4 bytes per sequence and 8 per document until `finalize`.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        dtype: np.dtype[np.integer] | str | None = None,
        *,
        vocab_size: int | None = None,
        overwrite: bool = False,
    ) -> None:
        self._bin_path, self._idx_path = store_paths(prefix)
        taken = [str(path) for path in (self._bin_path, self._idx_path) if path.exists()]
        if taken and not overwrite:
            raise ConfigError(
                f"the token store {' and '.join(taken)} already exists. Choose another prefix, or "
                "replace the store with overwrite=True."
            )
        self.dtype = best_dtype(vocab_size) if dtype is None else _layout_dtype(dtype)
        limits = np.iinfo(self.dtype)
        self._low, self._high = int(limits.min), int(limits.max)
        self._sizes = array("i")
        self._doc_idx = array("q", [0])
        self._bin_path.parent.mkdir(parents=True, exist_ok=True)
        self._bin_tmp = self._bin_path.with_name(self._bin_path.name + ".tmp")
        self._idx_tmp = self._idx_path.with_name(self._idx_path.name + ".tmp")
        self._file = self._bin_tmp.open("wb")

    def add_item(self, sequence: Sequence[int] | NDArray[np.integer]) -> None:
        """Append one sequence of token ids.

        Raises:
            DataError: an id is out of range for the dtype.
        """
        tokens = np.asarray(sequence, dtype=None if len(sequence) else np.int64)
        if tokens.dtype.kind not in "iu" or tokens.ndim != 1:
            raise DataError(
                f"the tokens have dtype {tokens.dtype} and shape {tokens.shape} (needed: a flat "
                "sequence of integers)."
            )
        self._write(tokens)
        self._sizes.append(len(tokens))

    def end_document(self) -> None:
        """End a document, which consists of the sequences added since the previous call."""
        self._doc_idx.append(len(self._sizes))

    def add_store(self, store: TokenStore) -> None:
        """Append every sequence and document of another store."""
        offset = len(self._sizes)
        for at in range(0, store.num_tokens, _COPY_TOKENS):
            self._write(store.tokens[at : at + _COPY_TOKENS])
        self._sizes.extend(array("i", np.ascontiguousarray(store.sizes, dtype="i").tobytes()))
        marks = np.asarray(store.doc_idx[1:]) + offset
        self._doc_idx.extend(array("q", marks.astype(np.int64).tobytes()))
        self._end_open_document()

    def _end_open_document(self) -> None:
        if self._doc_idx[-1] < len(self._sizes):
            self.end_document()

    def _write(self, tokens: NDArray[np.integer]) -> None:
        if len(tokens):
            low, high = int(tokens.min()), int(tokens.max())
            if low < self._low or high > self._high:
                wrong = low if low < self._low else high
                raise DataError(
                    f"token id {wrong} is out of range for {self.dtype.name} ({self._low} to "
                    f"{self._high}) in {str(self._bin_path)!r}. Pass the correct vocab_size, or "
                    "a wider dtype."
                )
        self._file.write(tokens.astype(self.dtype, copy=False).tobytes())

    def finalize(self) -> None:
        """End an unfinished document, write the index, and give the files their final names."""
        self._end_open_document()
        sizes = np.frombuffer(self._sizes, dtype=np.int32).astype("<i4")
        pointers = np.zeros(len(sizes), dtype="<i8")
        np.cumsum(sizes[:-1], dtype=np.int64, out=pointers[1:])
        pointers *= self.dtype.itemsize
        code = next(c for c, name in DTYPE_CODES.items() if np.dtype(name) == self.dtype)
        with self._idx_tmp.open("wb") as file:
            file.write(HEADER.pack(MAGIC, 1, code, len(sizes), len(self._doc_idx)))
            file.write(sizes.tobytes())
            file.write(pointers.tobytes())
            file.write(np.frombuffer(self._doc_idx, dtype=np.int64).astype("<i8").tobytes())
            _sync(file)
        _sync(self._file)
        self._file.close()
        self._idx_path.unlink(missing_ok=True)
        self._bin_tmp.replace(self._bin_path)
        self._idx_tmp.replace(self._idx_path)

    def abandon(self) -> None:
        """Close and remove the temporary files; no store is written."""
        self._file.close()
        self._bin_tmp.unlink(missing_ok=True)
        self._idx_tmp.unlink(missing_ok=True)

    def __enter__(self) -> TokenStoreWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None and not self._file.closed:
            self.finalize()
        else:
            self.abandon()


def merge_stores(
    prefixes: Sequence[str | os.PathLike[str]],
    out_prefix: str | os.PathLike[str],
    *,
    overwrite: bool = False,
) -> None:
    """Merge the sequences and documents of several stores, in order, into one store.

    The dtype is the narrowest that can represent the tokens of all stores.

    Raises:
        ConfigError: `prefixes` is empty, or the output is one of the inputs or exists already.
    """
    if not prefixes:
        raise ConfigError(
            "prefixes is empty (needed: the path of at least one token store to merge)."
        )
    if Path(out_prefix).absolute() in [Path(prefix).absolute() for prefix in prefixes]:
        raise ConfigError(
            f"out_prefix={str(out_prefix)!r} is also an input of the merge. Choose another output."
        )
    dtype = np.result_type(*[TokenStore(prefix).dtype for prefix in prefixes])
    with TokenStoreWriter(out_prefix, dtype, overwrite=overwrite) as writer:
        for prefix in prefixes:  # one at a time, as mapped pages count as memory
            writer.add_store(TokenStore(prefix))


def _layout_dtype(dtype: np.dtype[np.integer] | str) -> np.dtype[np.integer]:
    """Return `dtype` in little-endian form, after checking that the file format supports it."""
    little = np.dtype(dtype).newbyteorder("<")
    dtypes = [np.dtype(name) for name in DTYPE_CODES.values()]
    if little not in dtypes:
        raise ConfigError(
            f"dtype={np.dtype(dtype).name} is not supported by token stores (supported: "
            f"{[d.name for d in dtypes]})."
        )
    return little


def _sync(file: BinaryIO) -> None:
    """Flush a file to disk."""
    file.flush()
    os.fsync(file.fileno())

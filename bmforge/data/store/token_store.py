"""Token store: tokens in ``PREFIX.bin``, sequence and document offsets in ``PREFIX.idx``.

The layout is Megatron-LM's ``MMIDIDX`` version 1, little-endian, so existing corpora open
unchanged. ``.idx`` is: the magic (9 bytes), u64 version, u8 dtype code, u64 number of sequences,
u64 length of doc_idx, i32 sizes[], i64 byte pointers[], i64 doc_idx[]. ``.bin`` is the raw tokens.
Source: Megatron-LM ``indexed_dataset.py``. Codes 6 and 7 (floats) are refused, as floats are not
token ids.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bmforge.errors import DataError
from bmforge.logging import ProgressBar

__all__ = ["DTYPE_CODES", "HEADER", "MAGIC", "TokenStore", "check_vocabulary", "store_paths"]

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPE_CODES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_SCAN_TOKENS = 1 << 22
_SPAN_DOCUMENTS = 1 << 16
_DIGEST_PIECES = 64
_DIGEST_PIECE = 512


def store_paths(prefix: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Return the paths ``PREFIX.bin`` and ``PREFIX.idx``."""
    name = os.fspath(prefix)
    return Path(name + ".bin"), Path(name + ".idx")


class TokenStore:
    """Token store opened for reading; the files are memory-mapped and not copied.

    Args:
        prefix: path of the store without ``.bin`` or ``.idx``.

    Attributes:
        tokens: all tokens concatenated, shape (num_tokens,), mapped.
        sizes: tokens per sequence, shape (len(self),), int32, mapped.
        pointers: byte offset of each sequence in .bin, shape (len(self),), int64, mapped.
        doc_idx: first sequence of each document, then the number of sequences; int64, mapped.

    Raises:
        DataError: a file is missing, not a token store, damaged, or cut off.

    Memory: a few kB, independent of the size of the corpus; pages are loaded on access.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = Path(prefix)
        bin_path, idx_path = store_paths(prefix)
        for path in (bin_path, idx_path):
            if not path.is_file():
                raise DataError(
                    f"{str(path)!r} of token store {str(prefix)!r} does not exist. Pass the path "
                    "without .bin or .idx, or write the store with bmforge prepare."
                )
        self.dtype, sequences, marks = _read_header(idx_path)
        self.tokens = _map(bin_path, self.dtype, 0, bin_path.stat().st_size // self.dtype.itemsize)
        at = HEADER.size
        self.sizes = _map(idx_path, np.dtype("<i4"), at, sequences)
        self.pointers = _map(idx_path, np.dtype("<i8"), at + 4 * sequences, sequences)
        self.doc_idx = _map(idx_path, np.dtype("<i8"), at + 12 * sequences, marks)
        self._check_ends(bin_path, idx_path)

    def _check_ends(self, bin_path: Path, idx_path: Path) -> None:
        """Check that the index fits the size of .bin, reading only its first and last entries."""
        count = len(self.sizes)
        needed = 0
        if count:
            needed = int(self.pointers[-1]) + int(self.sizes[-1]) * self.dtype.itemsize
        if count and int(self.pointers[0]) != 0:
            raise DataError(
                f"{str(idx_path)!r} is damaged, because its first sequence begins at byte "
                f"{int(self.pointers[0])} instead of 0. Copy or write the store again."
            )
        if bin_path.stat().st_size != needed:
            raise DataError(
                f"{str(bin_path)!r} has {bin_path.stat().st_size} bytes, but its index needs "
                f"{needed}, so one of the two files is truncated or from another store. Copy both "
                "files again."
            )
        marks = self.doc_idx
        if len(marks) and not (int(marks[0]) == 0 and 0 <= int(marks[-1]) <= count):
            raise DataError(
                f"{str(idx_path)!r} is damaged, because doc_idx runs from {int(marks[0])} to "
                f"{int(marks[-1])}, but there are {count} sequences. Copy or write the "
                "store again."
            )

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.sizes)

    def map_for_random_access(self) -> NDArray[np.integer]:
        """Return a second memory mapping of `tokens`, for reading short spans in random order.

        The second mapping has no read-ahead: the default read-ahead (8 MB on one system) made
        reading an uncached span at a random offset over 100 times slower, but sequential scans
        need it.
        """
        tokens = _map(store_paths(self.prefix)[0], self.dtype, 0, self.num_tokens)
        mapping = getattr(tokens.base, "_mmap", None)
        if mapping is not None and hasattr(mmap, "MADV_RANDOM"):
            mapping.madvise(mmap.MADV_RANDOM)
        return tokens

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the store."""
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        """Number of documents in the store."""
        marks = len(self.doc_idx)
        last = int(self.doc_idx[-1]) if marks else 0
        return max(marks - 1, 0) + (last < len(self))

    def get(self, i: int, offset: int = 0, length: int | None = None) -> NDArray[np.integer]:
        """Return `length` tokens of sequence `i`, from `offset` on (default: all that follow).

        The result is a view of the memory-mapped file.

        Raises:
            IndexError: there is no sequence `i`, or the range exceeds it.
        """
        index = i + len(self) if i < 0 else i
        if not 0 <= index < len(self):
            raise IndexError(
                f"sequence {i} is out of range for a store with {len(self)} sequences."
            )
        size = int(self.sizes[index])
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            raise IndexError(
                f"offset={offset} and length={length} exceed the sequence of {size} tokens."
            )
        start = int(self.pointers[index]) // self.dtype.itemsize + offset
        return self.tokens[start : start + length]

    def __getitem__(self, key: int | slice) -> NDArray[np.integer] | list[NDArray[np.integer]]:
        """Return one sequence or, for a slice with step 1, a list of sequences."""
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step != 1:
                raise IndexError(f"a slice with step {step} is not supported. Use step 1.")
            return [self.get(i) for i in range(start, stop)]
        return self.get(key)

    def digest(self) -> int:
        """Return a 63-bit hash of the store's content, independent of its location.

        The hash covers the numbers of tokens and sequences, 64 evenly spaced samples of 512 tokens,
        and 64 of 512 sizes. It distinguishes corpora, but may miss a single changed token.
        """
        digest = blake2b(digest_size=8)
        for values in (self.map_for_random_access(), self.sizes):
            digest.update(len(values).to_bytes(8, "little"))
            last = max(len(values) - _DIGEST_PIECE, 0)
            for start in np.linspace(0, last, _DIGEST_PIECES, dtype=np.int64).tolist():
                digest.update(values[start : start + _DIGEST_PIECE].astype("<i8").tobytes())
        return int.from_bytes(digest.digest(), "little") >> 1

    def documents(self) -> Iterator[tuple[int, int]]:
        """Yield the token range of each document: first token, and one past its last.

        Sequences after the last entry of doc_idx count as one more document.
        """
        marks, count = len(self.doc_idx), len(self)
        start = 0
        for at in range(1, marks, _SPAN_DOCUMENTS):
            chunk = np.array(self.doc_idx[at : at + _SPAN_DOCUMENTS])
            ends = np.full(len(chunk), self.num_tokens, dtype=np.int64)
            inside = chunk < count
            ends[inside] = self.pointers[chunk[inside]] // self.dtype.itemsize
            for end in ends.tolist():
                yield start, end
                start = end
        if count and (not marks or int(self.doc_idx[-1]) < count):
            yield start, self.num_tokens


def _read_header(path: Path) -> tuple[np.dtype[np.integer], int, int]:
    """Read and check the header of an index: (dtype, number of sequences, length of doc_idx)."""
    with path.open("rb") as file:
        head = file.read(HEADER.size)
    if head[: len(MAGIC)] != MAGIC:
        hint = " (TNTIDX is a legacy format)" if head.startswith(b"TNTIDX") else ""
        raise DataError(
            f"{str(path)!r} is not a token store index, because it begins with {head[:9]!r}{hint} "
            f"instead of {MAGIC!r}. Write the store with bmforge prepare."
        )
    if len(head) < HEADER.size:
        raise DataError(
            f"{str(path)!r} is truncated inside its header. Copy or write the file again."
        )
    _, version, code, sequences, marks = HEADER.unpack(head)
    if version != 1:
        raise DataError(
            f"{str(path)!r} has version {version}, but only version 1 is supported. "
            "Export the store as version 1 with the program that wrote it."
        )
    if code not in DTYPE_CODES:
        raise DataError(
            f"{str(path)!r} has dtype code {code} (supported: {sorted(DTYPE_CODES)}; 6 and 7 "
            "are floating-point types). Write the store again with integers."
        )
    needed = HEADER.size + 12 * sequences + 8 * marks
    if path.stat().st_size != needed:
        raise DataError(
            f"{str(path)!r} has {path.stat().st_size} bytes, but its header needs {needed} "
            f"({sequences} sequences, {marks} document marks), so it is truncated or damaged. Copy "
            "or write the file again."
        )
    return np.dtype(DTYPE_CODES[code]), sequences, marks


def _map(path: Path, dtype: np.dtype[np.integer], offset: int, count: int) -> NDArray[np.integer]:
    """Memory-map `count` values of type `dtype` at byte `offset` of a file; `count` may be 0."""
    if count == 0:
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,)).view(np.ndarray)


def check_vocabulary(store: TokenStore, vocab_size: int) -> int:
    """Read the whole store; return its largest token id, which must be below `vocab_size`.

    Raises:
        DataError: an id is outside of the model's vocabulary.
    """
    largest = -1
    with ProgressBar("check vocabulary", store.num_tokens) as bar:
        for at in range(0, store.num_tokens, _SCAN_TOKENS):
            part = store.tokens[at : at + _SCAN_TOKENS]
            low, high = int(part.min()), int(part.max())
            if low < 0 or high >= vocab_size:
                wrong = low if low < 0 else high
                raise DataError(
                    f"token store {str(store.prefix)!r} contains the token id {wrong}, "
                    f"but the model has vocab_size={vocab_size}. Set the model's "
                    f"vocab_size to at least {high + 1}, or prepare the corpus with the "
                    "model's own tokenizer."
                )
            largest = max(largest, high)
            bar.advance(len(part))
    return largest

"""Block datasets of BMTrain, ModelCenter and CPM-Live: safe reader and converter.

A dataset is a directory. ``meta.bin`` has a line with a JSON object for each data file: file_name,
block_begin, block_end, nbytes, nlines, mask and sometimes block_size. A data file consists of
blocks of equal size; a block consists of records, each 0x1F, its length (uint32, little-endian) and
that many bytes of pickle, then 0x00 up to the end. BMTrain and ModelCenter use an older format:
``meta.bin`` is one pickle, and records have no lengths. All pickles are read by `safe_pickle`, so
no code in them runs.

Source: ``cpm_live/dataset/distributed_dataset.py`` of OpenBMB/CPM-Live, and
``model_center/dataset/distributed_dataset.py`` of OpenBMB/ModelCenter.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bmforge.data.store.safe_pickle import load_block_files, load_plain, read_plain
from bmforge.data.store.writer import TokenStoreWriter
from bmforge.errors import ConfigError, DataError
from bmforge.logging import track

__all__ = ["BlockDataset", "BlockFile", "blocks_to_store"]

META_FILE = "meta.bin"
BLOCK_BYTES = 16 << 20
_RECORD, _END = 0x1F, 0x00
_PICKLE = b"\x80"
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class BlockFile:
    """One data file of a block dataset, as listed in ``meta.bin``.

    Args:
        file_name: name of the data file, in the directory of ``meta.bin``.
        block_begin: index of its first block in the dataset.
        block_end: index of its last block, plus one.
        nbytes: total bytes of its records, including their length prefixes.
        nlines: number of its records.
        mask: True to skip this file.
        block_size: size of a block in bytes.
        has_lengths: True if records are prefixed with their lengths.
    """

    file_name: str
    block_begin: int
    block_end: int
    nbytes: int
    nlines: int
    mask: bool = False
    block_size: int = BLOCK_BYTES
    has_lengths: bool = True


class BlockDataset:
    """Records of a block dataset, in the order in which they were written.

    Args:
        directory: directory with ``meta.bin``.
        block_bytes: size of a block in bytes, if ``meta.bin`` does not have it.
        form: encoding of records: "pickle", "json" or "raw" (plain bytes).

    Attributes:
        files: the data files, including masked ones.

    Raises:
        ConfigError: `form` is unknown.
        DataError: ``meta.bin`` is missing or damaged, or a data file is missing or cut off.

    Memory: one block.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        block_bytes: int = BLOCK_BYTES,
        form: str = "pickle",
    ) -> None:
        if form not in _FORMS:
            raise ConfigError(f"unknown form: form={form!r} (supported: {sorted(_FORMS)}).")
        self.directory = Path(directory)
        self._load = _FORMS[form]
        self.files = _read_meta(self.directory / META_FILE, block_bytes)
        for file in self.files:
            if not file.mask:
                self._check_size(file)

    def _check_size(self, file: BlockFile) -> None:
        path = self.directory / file.file_name
        expected = (file.block_end - file.block_begin) * file.block_size
        size = path.stat().st_size if path.is_file() else None
        if size != expected:
            state = "is missing" if size is None else f"has {size} bytes"
            raise DataError(
                f"{str(path)!r} {state}, but {META_FILE} lists "
                f"{file.block_end - file.block_begin} blocks of {file.block_size} bytes. "
                "Download the file again, or pass the block_bytes with which it was written."
            )

    def __len__(self) -> int:
        """Return the number of records in all files that are not masked."""
        return sum(file.nlines for file in self.files if not file.mask)

    def __iter__(self) -> Iterator[Any]:
        """Yield every record of every file that is not masked.

        Raises:
            DataError: a record is damaged or would run code; the message names file, block and
                record.
        """
        for file in self.files:
            if not file.mask:
                yield from self._read_file(file)

    def _read_file(self, file: BlockFile) -> Iterator[Any]:
        count = 0
        for block in range(file.block_begin, file.block_end):
            for _, record in self.read_block(block):
                yield record
                count += 1
        if count != file.nlines:
            raise DataError(
                f"{str(self.directory / file.file_name)!r} has {count} records, but {META_FILE} "
                f"lists {file.nlines}. Download the file again."
            )

    def file_of(self, block: int) -> BlockFile:
        """Return the data file that contains a block of the dataset."""
        return next(file for file in self.files if block < file.block_end)

    def read_block(self, block: int) -> Iterator[tuple[int, Any]]:
        """Yield the records of one block, each with its end offset in the block.

        Raises:
            DataError: a record is damaged or would run code.
        """
        file = self.file_of(block)
        path, index = self.directory / file.file_name, block - file.block_begin
        with path.open("rb") as stream:
            stream.seek(index * file.block_size)
            content = stream.read(file.block_size)
        find = self._split if file.has_lengths else self._split_old
        yield from find(content, path, index)

    def _split(self, content: bytes, path: Path, block: int) -> Iterator[tuple[int, Any]]:
        for number, (start, end) in enumerate(_records(content, path, block)):
            try:
                yield end, self._load(content[start:end])
            except DataError as error:
                raise DataError(f"{_place(path, block, number)}: {error}") from error

    def _split_old(self, content: bytes, path: Path, block: int) -> Iterator[tuple[int, Any]]:
        """Split a block of the older format, which has no record lengths."""
        stream = io.BytesIO(content)
        for number in itertools.count():
            mark = stream.read(1)
            if mark in (b"", bytes([_END])):
                return
            try:
                if mark != bytes([_RECORD]):
                    raise DataError(
                        f"the record begins with {mark!r} instead of 0x1f, so the file is damaged. "
                        "Download it again."
                    )
                record = read_plain(stream)
            except DataError as error:
                raise DataError(f"{_place(path, block, number)}: {error}") from error
            yield stream.tell(), record


def blocks_to_store(
    directory: str | os.PathLike[str],
    prefix: str | os.PathLike[str],
    *,
    encode: Callable[[Any], Sequence[int]] | None = None,
    vocab_size: int | None = None,
    block_bytes: int = BLOCK_BYTES,
    form: str = "pickle",
    overwrite: bool = False,
) -> int:
    """Convert a block dataset into a token store; each record becomes one document.

    Args:
        directory: the block dataset.
        prefix: path of the token store without ``.bin`` or ``.idx``.
        encode: function from a record to token ids; not needed if records are lists or arrays
            of ids.
        vocab_size: vocabulary size, which determines the store's dtype.
        block_bytes: size of a block in bytes, if ``meta.bin`` does not have it.
        form: "pickle", "json" or "raw".
        overwrite: True to replace an existing store.

    Returns:
        The number of records.

    Raises:
        ConfigError: the token store exists already.
        DataError: a record is damaged, unsafe or not a list of token ids.

    Memory: one block.
    """
    dataset = BlockDataset(directory, block_bytes=block_bytes, form=form)
    with TokenStoreWriter(prefix, vocab_size=vocab_size, overwrite=overwrite) as writer:
        count = 0
        for record in track(dataset, "convert blocks", total=len(dataset)):
            ids = _token_ids(record, count) if encode is None else encode(record)
            writer.add_item(ids)
            writer.end_document()
            count += 1
    return count


def _token_ids(record: Any, number: int) -> Sequence[int] | np.ndarray:
    """Return `record`, after checking that it is a list or array of token ids."""
    if isinstance(record, np.ndarray) and record.ndim == 1 and record.dtype.kind in "iu":
        return record
    if isinstance(record, list | tuple) and all(type(id) is int for id in record):
        return record
    raise DataError(
        f"record {number} is a {type(record).__name__}, not a list of token ids. Pass "
        "encode, a function that converts a record to token ids (for text, a "
        "tokenizer's encode)."
    )


def _load_json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:
        raise DataError(
            f"the record is not JSON ({error}). The file may have been written with form='pickle'."
        ) from error


_FORMS: dict[str, Callable[[bytes], Any]] = {
    "pickle": load_plain,
    "json": _load_json,
    "raw": bytes,
}


def _read_meta(path: Path, block_bytes: int) -> list[BlockFile]:
    """Read the file list ``meta.bin``, and check that its files cover contiguous ranges of
    blocks.
    """
    try:
        content = path.read_bytes()
        is_old = content[:1] == _PICKLE
        lines = _old_lines(path, content) if is_old else content.decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"cannot read {str(path)!r} ({error}). A block dataset is a directory with a "
            f"{META_FILE}."
        ) from error
    files: list[BlockFile] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        file = _read_meta_line(line, f"{str(path)!r}, line {number}", block_bytes)
        begin = files[-1].block_end if files else 0
        if file.block_begin != begin or file.block_end < begin:
            raise DataError(
                f"{str(path)!r}, line {number}: the file has blocks {file.block_begin} to "
                f"{file.block_end}, but the files before it end at block {begin}. The file is "
                "damaged. Download it again."
            )
        files.append(file)
    return files


def _old_lines(path: Path, content: bytes) -> list[str]:
    """Convert a pickled ``meta.bin`` to the lines of the current format."""
    names = ("file_name", "block_begin", "block_end", "nbytes", "nlines", "mask")
    try:
        rows = [dict(zip(names, row, strict=True)) for row in load_block_files(content)]
    except DataError as error:
        raise DataError(f"{str(path)!r}: {error}") from error
    return [json.dumps({**row, "has_lengths": False}) for row in rows]


def _read_meta_line(line: str, where: str, block_bytes: int) -> BlockFile:
    try:
        meta = json.loads(line)
        numbers = {
            name: int(meta[name]) for name in ("block_begin", "block_end", "nbytes", "nlines")
        }
        name, mask = str(meta["file_name"]), bool(meta.get("mask", False))
        has_lengths = bool(meta.get("has_lengths", True))
        size = int(meta.get("block_size", block_bytes))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"{where}: {line!r:.80} does not describe a data file ({type(error).__name__}: "
            f"{error}). The file is damaged. Download it again."
        ) from error
    if name in ("", ".", "..") or Path(name).name != name or "\\" in name or size < 1:
        raise DataError(
            f"{where}: file_name={name!r:.80} and block_size={size} are invalid (needed: "
            "the name of a file in the same directory, and a size)."
        )
    return BlockFile(name, mask=mask, block_size=size, has_lengths=has_lengths, **numbers)


def _records(content: bytes, path: Path, block: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end offset of each record's payload in a block."""
    at = number = 0
    while at < len(content) and content[at] != _END:
        start = at + 1 + _LENGTH.size
        if content[at] != _RECORD or start > len(content):
            raise DataError(
                f"{_place(path, block, number)} begins with byte 0x{content[at]:02x} at offset "
                f"{at} instead of 0x1f. Either the file is damaged, or block_bytes is wrong."
            )
        end = start + _LENGTH.unpack_from(content, at + 1)[0]
        if end > len(content):
            raise DataError(
                f"{_place(path, block, number)} extends {end - len(content)} bytes beyond its "
                "block. Either the file is damaged, or block_bytes is wrong."
            )
        yield start, end
        at, number = end, number + 1


def _place(path: Path, block: int, number: int) -> str:
    """Describe the location of a record for messages, with indices from 0."""
    return f"{str(path)!r}, block {block}, record {number}"

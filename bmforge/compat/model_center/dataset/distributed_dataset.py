"""ModelCenter's block datasets, which are written in blocks and read by several processes.

The module reads ModelCenter's and CPM-Live's files, and writes CPM-Live's format. Records are
numbers, texts, lists, dicts and numeric arrays; nothing in a file is executed.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from bmforge.compat.bmtrain.synchronize import gather_result
from bmforge.data.store.blocks import BLOCK_BYTES, META_FILE, BlockDataset, BlockFile
from bmforge.data.store.safe_pickle import load_plain
from bmforge.errors import ConfigError, DataError
from bmforge.files import replace_atomically, replace_file

__all__ = ["DatasetBuilder", "DatasetWriter", "DistributedDataset", "SimpleDataset"]
__all__ += ["build_dataset", "mask_dataset"]

_NEVER = 0x7FFFFFFF  # read count that marks the blocks of other processes


class DistributedDataset:
    """Endless reader of a dataset, in which each process reads its own blocks.

    Files that are added to the dataset while it is read are read too.

    Args:
        path: directory with `meta.bin`.
        rank: rank of the process.
        world_size: number of processes.
        block_size: block size in bytes, if `meta.bin` does not contain it.
    """

    def __init__(
        self, path: str, rank: int = 0, world_size: int = 1, block_size: int = BLOCK_BYTES
    ) -> None:
        self._path, self._block_size = Path(path), block_size
        self._rank, self._world_size = rank, world_size
        self._seen_at = -1
        self._times = torch.zeros(0, dtype=torch.int)  # read count of each block
        self._open_block(-1, 0)
        self._update()

    def _update(self) -> None:
        """Read the file list again if it may have changed."""
        meta = self._path / META_FILE
        changed_at = meta.stat().st_mtime_ns if meta.is_file() else 0
        if changed_at == self._seen_at:
            return
        self._data = BlockDataset(self._path, block_bytes=self._block_size)
        self._seen_at = changed_at
        count = self._data.files[-1].block_end if self._data.files else 0
        if count < len(self._times):
            raise DataError(
                f"{str(meta)!r} has fewer blocks than when it was last read. While a dataset is "
                "being read, add files to it, but remove none."
            )
        fresh = torch.zeros(count - len(self._times), dtype=torch.int)
        self._times = torch.cat((self._times, fresh))

    def _next_block(self) -> int:
        """Return the block of this process that has been read least often."""
        self._update()
        times = torch.full_like(self._times, _NEVER)
        times[self._rank :: self._world_size] = self._times[self._rank :: self._world_size]
        for file in self._data.files:
            if file.mask:
                times[file.block_begin : file.block_end] = _NEVER
        if not len(times) or int(times.min()) == _NEVER:
            raise DataError(
                f"{str(self._path)!r} has no block for process {self._rank} of "
                f"{self._world_size}. Write smaller blocks (block_size of build_dataset), or "
                "start fewer processes."
            )
        return int(times.argmin())

    def _open_block(self, block: int, offset: int) -> None:
        """Continue reading at byte `offset` of a block; if `block` is -1, read nothing."""
        self._block, self._offset = block, offset
        self._left: Iterator[tuple[int, Any]] = iter(())
        if block >= 0:
            self._left = (r for r in self._data.read_block(block) if r[0] > offset)

    def read(self) -> Any:
        """Return the next record; after the last record, start again with the first.

        Raises:
            DataError: this process has no block, or a file is damaged.
        """
        for _ in range(len(self._times) + 2):
            for end, record in self._left:
                self._offset = end
                return record
            block = self._next_block()
            self._times[block] += 1
            self._open_block(block, 0)
        raise DataError(
            f"{str(self._path)!r} has no records for process {self._rank}. Start fewer processes, "
            "or add records."
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Return the positions of all processes; every process must call this."""
        self._update()
        position = torch.tensor([[self._block, self._offset]])
        if self._world_size == 1:
            return {"states": self._times.clone(), "block": position}
        own = torch.zeros_like(self._times)
        own[self._rank :: self._world_size] = self._times[self._rank :: self._world_size]
        states = gather_result(own[None]).sum(0, dtype=torch.int)
        return {"states": states, "block": gather_result(position)}

    def load_state_dict(self, state: dict[str, Tensor], strict: bool = True) -> None:
        """Continue from a saved position.

        Args:
            state: result of `state_dict` on any process.
            strict: True to raise an error if the number of processes has changed; if False, partly
                read blocks are then read from their start.

        Raises:
            ConfigError: the number of processes has changed (with `strict`), or the state belongs
                to another dataset.
        """
        block = state["block"]
        if strict and len(block) != self._world_size:
            raise ConfigError(
                f"the state has {len(block)} processes, but this run has "
                f"{self._world_size}. Start {len(block)} processes, or pass strict=False."
            )
        self._update()
        count = len(self._times)
        if len(state["states"]) > count or int(block[:, 0].max()) >= count:
            raise ConfigError(
                f"the state has {len(state['states'])} blocks, but {str(self._path)!r} has "
                f"{count}, so the state was saved for another dataset. Pass the state of "
                "this dataset."
            )
        self._times.zero_()
        self._times[: len(state["states"])] = state["states"]
        is_same = len(block) == self._world_size
        self._open_block(*(block[self._rank].tolist() if is_same else (-1, 0)))

    @property
    def nbytes(self) -> int:
        """Total size of all records in bytes."""
        return sum(file.nbytes for file in self._data.files)


class SimpleDataset(DistributedDataset):
    """Reader that returns each record of a dataset once, in a single process."""

    def __init__(self, path: str, block_size: int = BLOCK_BYTES) -> None:
        super().__init__(path, 0, 1, block_size)

    def _next_block(self) -> int:
        block = super()._next_block()
        if int(self._times[block]):
            raise EOFError(f"{str(self._path)!r} has no more records.")
        return block

    def __iter__(self) -> Iterator[Any]:
        while True:
            try:
                yield self.read()
            except EOFError:
                return

    def __len__(self) -> int:
        return len(self._data)


class DatasetWriter:
    """Writes records into the blocks of a data file.

    Args:
        file: file that is open for writing.
        block_size: block size in bytes.
    """

    def __init__(self, file: BinaryIO, block_size: int) -> None:
        self._file, self._block_size, self._used = file, block_size, 0
        self.nbytes = self.nlines = 0
        self.nblocks = 1

    def write(self, data: Any) -> None:
        """Append a record of numbers, texts, lists, dicts and arrays of numbers.

        Raises:
            DataError: the record has values of a different type, or is larger than a block.
        """
        content = pickle.dumps(data, protocol=4)
        load_plain(content)  # raises an error for a record that could not be read again
        content = b"\x1f" + struct.pack("<I", len(content)) + content
        if len(content) > self._block_size:
            raise DataError(
                f"a record of {len(content)} bytes does not fit into a block of "
                f"{self._block_size}. Pass a larger block_size."
            )
        if self._used + len(content) > self._block_size:
            self._fill()
            self.nblocks += 1
        self._file.write(content)
        self._used += len(content)
        self.nbytes += len(content)
        self.nlines += 1

    def _fill(self) -> None:
        self._file.write(b"\x00" * (self._block_size - self._used))
        self._used = 0

    def close(self) -> None:
        """Pad the last block."""
        self._fill()


class DatasetBuilder:
    """Context manager that creates a file of a dataset and returns its `DatasetWriter`.

    Args:
        path: directory of the dataset; created if missing.
        dbname: name of the file.
        block_size: block size in bytes.

    Raises:
        ConfigError: the file exists already.
    """

    def __init__(self, path: str, dbname: str, block_size: int = BLOCK_BYTES) -> None:
        self._path, self._name, self._block_size = Path(path), dbname, block_size
        self._path.mkdir(parents=True, exist_ok=True)
        names = [file.file_name for file in _files(self._path)]
        if dbname in names or (self._path / dbname).exists():
            raise ConfigError(f"{str(self._path / dbname)!r} already exists. Choose another name.")

    def __enter__(self) -> DatasetWriter:
        self._target = replace_atomically(self._path / self._name)
        self._writer = DatasetWriter(self._target.__enter__(), self._block_size)
        return self._writer

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is None:
            self._writer.close()
        self._target.__exit__(kind, *error)
        if kind is not None:
            return
        files, done = _files(self._path), self._writer
        begin = files[-1].block_end if files else 0
        sizes = (begin, begin + done.nblocks, done.nbytes, done.nlines, False, self._block_size)
        _write_meta(self._path, [*files, BlockFile(self._name, *sizes)])


def build_dataset(path: str, dbname: str, block_size: int = BLOCK_BYTES) -> DatasetBuilder:
    """Return a context manager that writes a new file of a dataset."""
    return DatasetBuilder(path, dbname, block_size)


def mask_dataset(path: str, dbname: str, mask: bool = True) -> None:
    """Exclude a file of the dataset from reading or, if `mask` is False, include it again.

    Raises:
        ConfigError: the dataset has no such file.
    """
    files = _files(Path(path))
    if dbname not in [file.file_name for file in files]:
        raise ConfigError(
            f"{path!r} has no file {dbname!r} (files: {[f.file_name for f in files]})."
        )
    changed = [dataclasses.replace(f, mask=mask) if f.file_name == dbname else f for f in files]
    _write_meta(Path(path), changed)


def _files(directory: Path) -> list[BlockFile]:
    return BlockDataset(directory).files if (directory / META_FILE).is_file() else []


def _write_meta(directory: Path, files: list[BlockFile]) -> None:
    lines = (json.dumps(dataclasses.asdict(file)) + "\n" for file in files)
    replace_file(directory / META_FILE, "".join(lines))

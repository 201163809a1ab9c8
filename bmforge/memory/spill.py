"""Byte storage outside the device: host memory, or an unnamed file on disk.

A spill file is unlinked when it is created, so that a killed run leaves no file behind. Its whole
size is allocated at once, so that a full disk is reported before training starts. Data is read into
process memory and never memory-mapped.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Protocol

import torch
from torch import Tensor

from bmforge.errors import ConfigError

__all__ = ["Bytes", "HostBytes", "SpillFile", "byte_memory", "format_bytes"]

_ALIGNMENT = 4096

ReadInto = Callable[[int, memoryview, int], None]


class Bytes(Protocol):
    """A range of bytes that is stored outside the device."""

    def read(self, start: int, stop: int) -> Tensor:
        """Return bytes as a uint8 tensor: a view if they are in host memory, otherwise a copy."""

    def write(self, start: int, values: Tensor) -> None:
        """Store a contiguous uint8 tensor; a view that `read` returned is not copied."""


class HostBytes:
    """Byte range in host memory.

    Args:
        memory: one-dimensional uint8 tensor.
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory

    def read(self, start: int, stop: int) -> Tensor:
        """Return a uint8 view of the stored bytes, without a copy."""
        return self._memory[start:stop]

    def write(self, start: int, values: Tensor) -> None:
        """Copy `values` into the memory, unless they are the view that `read` returned."""
        target = self._memory[start : start + values.numel()]
        if target.data_ptr() != values.data_ptr():
            target.copy_(values)


class SpillFile:
    """An unnamed file of fixed size.

    Args:
        directory: directory in which the file is created; None means the system's temporary
            directory.
        size_bytes: file size.
        option: name of the user's option for `directory`, for error messages.

    Raises:
        ConfigError: the directory is missing or not writable, or the disk has too little space.
    """

    def __init__(
        self, directory: Path | None, size_bytes: int, option: str = "offload.directory"
    ) -> None:
        folder = Path(tempfile.gettempdir() if directory is None else directory)
        self._used_bytes, self._size_bytes = 0, size_bytes
        self._file = _open_unlinked(folder, option)
        free_bytes = shutil.disk_usage(folder).free
        try:
            if size_bytes:
                # `truncate` would make a sparse file, and a full disk would be noticed in the
                # middle of a run.
                os.posix_fallocate(self._file.fileno(), 0, size_bytes)
        except OSError as error:
            self.close()
            raise ConfigError(
                f"{option}={str(folder)!r} has {format_bytes(free_bytes)} of free space, but "
                f"{format_bytes(size_bytes)} are needed ({error.strerror}). Free disk space, "
                "choose a directory on another disk, or offload less."
            ) from error

    def reserve(self, size_bytes: int) -> DiskBytes:
        """Return the next `size_bytes` bytes of the file as a range."""
        start = self._used_bytes
        # Ranges start at a multiple of 4096, so that a `DirectReader` reads no bytes before them.
        self._used_bytes += -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
        assert self._used_bytes <= self._size_bytes, "more bytes were reserved than the file has"
        return DiskBytes(self._file, start)

    @staticmethod
    def rounded(size_bytes: int) -> int:
        """Return the number of bytes that a reservation of `size_bytes` occupies."""
        return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT

    def close(self) -> None:
        """Close the file, which frees its disk space."""
        self._file.close()


class DiskBytes:
    """A byte range of a spill file.

    Args:
        file: open file, kept open by this object.
        offset: start of the range in the file.
    """

    def __init__(self, file: IO[bytes], offset: int) -> None:
        self._file, self._offset = file, offset

    def read(self, start: int, stop: int) -> Tensor:
        """Read bytes `start` to `stop` of the range into a new uint8 tensor."""
        values = torch.empty(stop - start, dtype=torch.uint8)
        read_into(self._file.fileno(), values, self._offset + start)
        return values

    def fill(self, target: Tensor, read: ReadInto | None = None) -> None:
        """Fill a contiguous host tensor with the bytes at the start of the range.

        Args:
            target: tensor of any dtype.
            read: function (file descriptor, memory, offset) that fills the memory; None means
                buffered reads.
        """
        if read is None:
            read_into(self._file.fileno(), target, self._offset)
        else:
            read(self._file.fileno(), byte_memory(target), self._offset)

    def write(self, start: int, values: Tensor) -> None:
        """Write a contiguous uint8 tensor to the file, from byte `start` of the range."""
        left, position = byte_memory(values), self._offset + start
        while left:
            # `pwrite` may write less than asked (at most 2 GiB on Linux) and does not move a shared
            # file position, so several threads can use the file.
            written = os.pwrite(self._file.fileno(), left, position)
            left, position = left[written:], position + written


def read_into(descriptor: int, target: Tensor, offset: int) -> None:
    """Fill a contiguous host tensor with the bytes of a file from `offset` on.

    Raises:
        OSError: the file has too few bytes after `offset`.
    """
    left, position = byte_memory(target), offset
    while left:
        count = os.preadv(descriptor, [left], position)
        if count == 0:
            raise OSError(
                f"the file is truncated: it ends at byte {position}, {len(left)} bytes early."
            )
        left, position = left[count:], position + count


def byte_memory(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous host tensor as a memoryview of bytes."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def format_bytes(count: float) -> str:
    """Format a number of bytes in a readable unit, such as ``1.5 GiB``."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _open_unlinked(folder: Path, option: str) -> IO[bytes]:
    """Create an unlinked file and open it for reading and writing.

    Raises:
        ConfigError: `folder` is not a writable directory.
    """
    try:
        return tempfile.TemporaryFile(dir=folder, buffering=0)
    except OSError as error:
        raise ConfigError(
            f"{option}={str(folder)!r} cannot be used ({error.strerror}). Choose an existing, "
            "writable directory on a disk with free space."
        ) from error

"""Safetensors files: reading into existing memory, and aligned writing.

A tensor is read from its offset in the file: directly into the parameter if both have the same
dtype and layout, otherwise through a small buffer. A rank therefore needs memory only for its
shards and this buffer.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.autograd.graph import increment_version

from bmforge.device import reads_without_sync
from bmforge.errors import CheckpointError
from bmforge.files import partial_name
from bmforge.logging import track

__all__ = [
    "FileReads",
    "CheckedFile",
    "Read",
    "SafeFile",
    "TensorFile",
    "read_file_identity",
    "read_slice",
    "run_reads",
    "write_file",
]

# Bytes that a thread reads at a time; small, because freed buffers stay in its allocator.
_CHUNK_BYTES = 1 << 20
_MAX_THREADS = 8
# Alignment for the widest loads of a CPU.
_ALIGN_BYTES = 64
_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class _Entry(NamedTuple):
    """Dtype, shape and byte range of a tensor in a file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


class FileReads(Protocol):
    """Interface of file readers; implementations must be thread-safe."""

    def open(self, path: Path) -> int:
        """Open a file and return its descriptor."""

    def read_into(self, descriptor: int, target: memoryview, offset: int) -> None:
        """Read bytes from `offset` into `target` until it is full.

        Raises `OSError` if the file is too short.
        """


class CheckedFile:
    """File of tensors that must not be replaced or changed while it is read.

    Args:
        path: path of the file.
        identity: result of `read_file_identity` when the file was opened.
    """

    def __init__(self, path: Path, identity: tuple[int, int, int]) -> None:
        self.path = path
        self._identity = identity

    def check_same(self, descriptor: int) -> None:
        """Raise `CheckpointError` if the open file is not the file whose header was read.

        Another program may have replaced or changed the file in between.
        """
        if read_file_identity(descriptor) != self._identity:
            raise CheckpointError(
                f"{str(self.path)!r} was changed while it was being read. Load the model again."
            )

    def damaged(self, reason: str) -> CheckpointError:
        """Return the error for a damaged file."""
        return _damaged(self.path, reason)


class SafeFile(CheckedFile):
    """Safetensors file whose tensors are read lazily; implements `TensorFile`.

    Args:
        path: path of the file.
        reads: reader of the file; if None, reads go through the page cache.

    Raises:
        CheckpointError: the file is truncated, or its header is inconsistent.
    """

    def __init__(self, path: Path, reads: FileReads | None = None) -> None:
        try:
            # `safe_open` checks sizes, offsets and dtypes. Framework "pt" would map the file,
            # which counts as memory of the process.
            with safe_open(path, framework="numpy"):
                pass
            with path.open("rb") as file:
                identity = read_file_identity(file.fileno())
                (length,) = struct.unpack("<Q", file.read(8))
                header: dict[str, Any] = json.loads(file.read(length))
        except (SafetensorError, OSError, ValueError, struct.error) as error:
            raise _damaged(path, str(error)) from error
        super().__init__(path, identity)
        self._reads = reads
        header.pop("__metadata__", None)
        self._entries: dict[str, _Entry] = {}
        for name, fields in header.items():
            first, last = fields["data_offsets"]
            extent = 8 + length + first, last - first
            self._entries[name] = _Entry(fields["dtype"], tuple(fields["shape"]), *extent)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Mapping from tensor name to shape."""
        return {name: entry.shape for name, entry in self._entries.items()}

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a stored tensor.

        Raises:
            CheckpointError: torch does not have the dtype.
        """
        kind = self._entries[name].dtype
        if kind not in _DTYPES:
            raise CheckpointError(
                f"{name} in {str(self.path)!r} has the unsupported dtype {kind} (supported: "
                f"{', '.join(_DTYPES)})."
            )
        return _DTYPES[kind]

    def fill(self, name: str, slices: tuple[slice, ...], target: Tensor) -> None:
        """Read a slice into `target`, a contiguous CPU tensor of the same shape and dtype."""
        entry, size = self._entries[name], self.dtype(name).itemsize
        runs = [(entry.start + n * size, m * size) for n, m in _runs(entry.shape, slices)]
        try:
            if self._reads is None:
                self._read_through_cache(_view_bytes(target), runs)
            else:
                self._read_by(self._reads, _view_bytes(target), runs)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{str(self.path)!r} was removed after the model was loaded. Restore it, or "
                "load the model from its current location."
            ) from error
        except OSError as error:
            raise self.damaged(str(error)) from error

    def _read_through_cache(self, view: memoryview, runs: list[tuple[int, int]]) -> None:
        with self.path.open("rb", buffering=0) as file:
            self.check_same(file.fileno())
            done = 0
            for start, size in runs:
                file.seek(start)
                end = done + size
                while done < end:
                    got = file.readinto(view[done:end])
                    if not got:
                        raise self.damaged("the file ends too early")
                    done += got

    def _read_by(self, reads: FileReads, view: memoryview, runs: list[tuple[int, int]]) -> None:
        descriptor = reads.open(self.path)
        try:
            self.check_same(descriptor)
            done = 0
            for start, size in runs:
                reads.read_into(descriptor, view[done : done + size], start)
                done += size
        finally:
            os.close(descriptor)


class TensorFile(Protocol):
    """Interface of files that contain tensors."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Mapping from tensor name to shape."""

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a stored tensor."""

    def fill(self, name: str, slices: tuple[slice, ...], target: Tensor) -> None:
        """Read a slice into `target`, a contiguous CPU tensor of the same shape and dtype."""


def read_slice(file: TensorFile, name: str, slices: Sequence[slice]) -> Tensor:
    """Return a slice of a tensor in its stored dtype; every dim has a start and a stop."""
    out = torch.empty([part.stop - part.start for part in slices], dtype=file.dtype(name))
    file.fill(name, tuple(slices), out)
    return out


@dataclass(frozen=True)
class Read:
    """Task to fill `target` with a slice of a stored tensor.

    Args:
        file: file with the tensor.
        name: name of the tensor.
        slices: one slice per dim of the tensor, optionally with a step.
        target: tensor with the slice's shape and any dtype, strides and device.
    """

    file: TensorFile
    name: str
    slices: tuple[slice, ...]
    target: Tensor

    def split(self) -> Iterator[Read]:
        """Yield reads of at most `_CHUNK_BYTES` (or of one row) along the first dim."""
        rows = self.target.shape[0] if self.target.dim() else 0
        if not rows:
            yield self
            return
        row_bytes = self.target.numel() // rows * self.file.dtype(self.name).itemsize
        step = max(1, _CHUNK_BYTES // max(row_bytes, 1))
        start, stride = self.slices[0].start, self.slices[0].step or 1
        for first in range(0, rows, step):
            last = min(first + step, rows)
            end = start + (last - 1) * stride + 1
            slices = (slice(start + first * stride, end, stride), *self.slices[1:])
            yield replace(self, slices=slices, target=self.target[first:last])

    def run(self) -> None:
        """Read the slice, through a buffer if dtype or layout differ from those of the file."""
        target, dtype = self.target.detach(), self.file.dtype(self.name)
        if any((part.step or 1) > 1 for part in self.slices):
            self._run_strided(target, dtype)
        elif reads_without_sync(target) and target.dtype == dtype and target.is_contiguous():
            self.file.fill(self.name, self.slices, target)
            increment_version([target])  # the write bypassed torch
        elif target.numel():
            buffer = torch.empty(target.shape, dtype=dtype)
            self.file.fill(self.name, self.slices, buffer)
            target.copy_(buffer)

    def _run_strided(self, target: Tensor, dtype: torch.dtype) -> None:
        """Read all bytes from the first to the last element, and copy the slice's elements."""
        dense = tuple(slice(part.start, part.stop) for part in self.slices)
        buffer = torch.empty([part.stop - part.start for part in dense], dtype=dtype)
        self.file.fill(self.name, dense, buffer)
        target.copy_(buffer[tuple(slice(None, None, part.step) for part in self.slices)])


def run_reads(reads: list[Read], title: str | None = None, threads: int | None = None) -> None:
    """Run all reads in chunks on several threads.

    Args:
        reads: reads into distinct targets.
        title: title of the progress bar; None for no progress bar.
        threads: number of threads (default: torch's, at most 8).
    """
    chunks = [chunk for read in reads for chunk in read.split()]
    threads = min(threads or min(_MAX_THREADS, torch.get_num_threads()), len(chunks))
    if threads <= 1:
        for chunk in track(chunks, title) if title else chunks:
            _run_without_gradient(chunk)
        return
    with ThreadPoolExecutor(threads) as pool:
        done = pool.map(_run_without_gradient, chunks)
        for _ in track(done, title, len(chunks)) if title else done:
            pass


def _run_without_gradient(read: Read) -> None:
    with torch.no_grad():  # threads do not inherit this mode
        read.run()


def _view_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor as a memoryview of bytes."""
    # Not a reshape: dimensions of size 1 may have any stride.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy())


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{str(path)!r} is damaged or not a weight file: {reason}. Download the file again."
    )


def read_file_identity(descriptor: int) -> tuple[int, int, int]:
    """Return the identity of an open file: inode, size and modification time."""
    status = os.fstat(descriptor)
    return status.st_ino, status.st_size, status.st_mtime_ns


def _runs(shape: tuple[int, ...], slices: tuple[slice, ...]) -> Iterator[tuple[int, int]]:
    """Yield (index of the first element, count) for each contiguous run in a slice."""
    depth, inner = len(shape), 1
    while depth and (slices[depth - 1].start, slices[depth - 1].stop) == (0, shape[depth - 1]):
        depth -= 1
        inner *= shape[depth]
    first, count = 0, inner
    if depth:
        depth -= 1
        first = slices[depth].start * inner
        count = (slices[depth].stop - slices[depth].start) * inner
    strides = [math.prod(shape[dim + 1 :]) for dim in range(depth)]
    for index in itertools.product(*(range(s.start, s.stop) for s in slices[:depth])):
        yield first + sum(i * n for i, n in zip(index, strides, strict=True)), count


def _alignment(tensor: Tensor) -> tuple[int, bool]:
    size = tensor.numel() * tensor.dtype.itemsize
    return -tensor.dtype.itemsize, size % _ALIGN_BYTES != 0


def write_file(
    path: Path, tensors: dict[str, Tensor], read: Callable[[str], Tensor] | None = None
) -> None:
    """Write a safetensors file to a temporary path and rename it when complete.

    The header is padded so that tensors start at multiples of 64 bytes, if their sizes allow it;
    memory-mapped weights are then aligned. One tensor is copied at a time.

    Args:
        path: path of the file.
        tensors: mapping from name to tensor, on the CPU or, with `read`, on the meta device.
        read: function (name) that returns a tensor; called once per tensor, in file order.

    Raises:
        CheckpointError: the file cannot be written, for example because the disk is full.
    """
    # Sorting by element size, largest first, aligns every tensor to its element size. Within a
    # size, tensors whose byte size is a multiple of the alignment come first.
    order = sorted(tensors, key=lambda name: (*_alignment(tensors[name]), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in order:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.dtype.itemsize
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN_BYTES)
    partial = path.with_name(partial_name(path.name))
    try:
        with partial.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for name in order:
                values = tensors[name] if read is None else read(name)
                file.write(_view_bytes(values.detach().contiguous()))
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise CheckpointError(
            f"cannot write {len(text) + offset:,} bytes to {str(path)!r} ({error.strerror}). Free "
            "disk space, or choose another directory."
        ) from error

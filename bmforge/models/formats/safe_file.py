"""safetensors files: reading straight into memory that is there, mapping, and aligned writing.

A tensor is read by its place in the file: into the parameter itself where both hold the same bytes,
else through a small buffer, so a sharded rank never holds more than its shard and that.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.autograd.graph import increment_version

from bmforge.device import reads_are_free
from bmforge.errors import CheckpointError
from bmforge.files import partial_name
from bmforge.logging import track

__all__ = [
    "FileReads",
    "MappedFile",
    "Read",
    "SafeFile",
    "TensorFile",
    "identify",
    "run_reads",
    "write_file",
]

# What one thread reads at a time. Its buffers stay in the allocator, several per thread.
_CHUNK_BYTES = 1 << 20
_MAX_THREADS = 8
# The widest loads of a CPU want addresses that are multiples of this.
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
    """Where a tensor lies: its first byte in the file, and how many there are."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


class FileReads(Protocol):
    """How bytes of files are read, from several threads at a time."""

    def open(self, path: Path) -> int:
        """Return a descriptor of a file."""

    def read_into(self, descriptor: int, target: memoryview, offset: int) -> None:
        """Fill `target` from `offset` on; `OSError` where the file ends before."""


class MappedFile:
    """A file of which tensors are read, and some mapped: the same from its opening to its end.

    Args:
        path: of the file.
        identity: what `identify` said of it when it was opened.
    """

    def __init__(self, path: Path, identity: tuple[int, int, int]) -> None:
        self.path = path
        self._identity = identity
        self._storage: torch.UntypedStorage | None = None
        self._mapped: set[str] = set()

    def map_place(
        self, name: str, start: int, size: int, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> Tensor | None:
        """Return a tensor whose memory is the file's: pages come in when they are first used.

        Writing to it changes this tensor's memory and never the file (copy on write). None where
        the file does not place it at a multiple of its element size.
        """
        if start % dtype.itemsize or not size:
            return None
        if self._storage is None or name in self._mapped:  # nobody else gets the same memory
            with self.path.open("rb") as file:
                self.check_same(file.fileno())
                length = os.fstat(file.fileno()).st_size
            self._storage = torch.UntypedStorage.from_file(str(self.path), False, length)
            self._mapped.clear()
        self._mapped.add(name)
        # A storage of its own, so that copying or pickling the tensor takes no neighbours along.
        part: Any = self._storage[start : start + size]
        return torch.empty(0, dtype=dtype).set_(part).view(shape)

    def check_same(self, descriptor: int) -> None:
        """Raise `CheckpointError` where an opened file is not the one from before."""
        if identify(descriptor) != self._identity:
            raise CheckpointError(f"{str(self.path)!r} was changed while it was being read.")

    def damaged(self, reason: str) -> CheckpointError:
        """Return the error for a file that cannot be read on."""
        return _damaged(self.path, reason)


class SafeFile(MappedFile):
    """One safetensors file, by the places of its tensors; nothing is read until asked for.

    Args:
        path: of the file.
        reads: how; None takes the usual way, through the system's cache.

    Raises:
        CheckpointError: the file is cut short, or its header contradicts itself.
    """

    def __init__(self, path: Path, reads: FileReads | None = None) -> None:
        try:
            # Opening checks sizes, places and dtypes. Not as "pt", whose map of the file counts as
            # memory of the process.
            with safe_open(path, framework="numpy"):
                pass
            with path.open("rb") as file:
                identity = identify(file.fileno())
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
            place = 8 + length + first, last - first
            self._entries[name] = _Entry(fields["dtype"], tuple(fields["shape"]), *place)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape by its name."""
        return {name: entry.shape for name, entry in self._entries.items()}

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype a tensor is stored with.

        Raises:
            CheckpointError: one that torch does not have.
        """
        kind = self._entries[name].dtype
        if kind not in _DTYPES:
            raise CheckpointError(
                f"{name} in {str(self.path)!r} has dtype {kind}; known: {', '.join(_DTYPES)}."
            )
        return _DTYPES[kind]

    def map_tensor(self, name: str) -> Tensor | None:
        """Return a tensor whose memory is the file's; see `MappedFile.map_place`."""
        entry = self._entries[name]
        return self.map_place(name, entry.start, entry.size, self.dtype(name), entry.shape)

    def fill(self, name: str, slices: tuple[slice, ...], target: Tensor) -> None:
        """Read a slice into `target` (its shape, plain, on the CPU, contiguous, same dtype)."""
        entry, size = self._entries[name], self.dtype(name).itemsize
        runs = [(entry.start + n * size, m * size) for n, m in _runs(entry.shape, slices)]
        try:
            if self._reads is None:
                self._read_through_cache(_view_bytes(target), runs)
            else:
                self._read_by(self._reads, _view_bytes(target), runs)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{str(self.path)!r} is not there any more; it was when the model was opened. Put "
                "it back, or open the model from where it is now."
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
                        raise self.damaged("it ends too early")
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
    """What loading needs of a file of tensors."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape by its name."""

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype a tensor is stored with."""

    def map_tensor(self, name: str) -> Tensor | None:
        """Return a tensor whose memory is the file's and nobody else's, where that can be."""

    def fill(self, name: str, slices: tuple[slice, ...], target: Tensor) -> None:
        """Read a slice into `target` (its shape, plain, on the CPU, contiguous, same dtype)."""


@dataclass(frozen=True)
class Read:
    """One piece of work: fill `target` with a slice of a tensor.

    Args:
        file: holds it.
        name: of the tensor.
        slices: one per dim of the tensor.
        target: of the slice's shape, in any dtype, order of dims and place.
    """

    file: TensorFile
    name: str
    slices: tuple[slice, ...]
    target: Tensor

    def split(self) -> Iterator[Read]:
        """Yield parts of at most `_CHUNK_BYTES` along the first dim, or of one entry of it."""
        rows = self.target.shape[0] if self.target.dim() else 0
        if not rows:
            yield self
            return
        row_bytes = self.target.numel() // rows * self.file.dtype(self.name).itemsize
        step = max(1, _CHUNK_BYTES // max(row_bytes, 1))
        start = self.slices[0].start
        for first in range(0, rows, step):
            last = min(first + step, rows)
            slices = (slice(start + first, start + last), *self.slices[1:])
            yield replace(self, slices=slices, target=self.target[first:last])

    def run(self) -> None:
        """Read, through a buffer where the target is not the file's bytes."""
        target, dtype = self.target.detach(), self.file.dtype(self.name)
        if reads_are_free(target) and target.dtype == dtype and target.is_contiguous():
            self.file.fill(self.name, self.slices, target)
            increment_version([target])  # torch did not write it
        elif target.numel():
            buffer = torch.empty(target.shape, dtype=dtype)
            self.file.fill(self.name, self.slices, buffer)
            target.copy_(buffer)


def run_reads(reads: list[Read], title: str | None = None, threads: int | None = None) -> None:
    """Do all the work with several threads, one chunk each at a time.

    Args:
        reads: none may have a target in common.
        title: of a progress bar over the chunks.
        threads: None takes as many as torch has, at most 8.
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
    with torch.no_grad():  # a thread does not inherit it
        read.run()


def _view_bytes(tensor: Tensor) -> memoryview:
    """Return a contiguous tensor's memory."""
    # Not a reshape: dims of size 1 may have any stride.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy())


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{str(path)!r} is damaged or not a weight file: {reason}. Download it anew."
    )


def identify(descriptor: int) -> tuple[int, int, int]:
    """Return what tells an opened file from what it may become: inode, bytes, time of change."""
    status = os.fstat(descriptor)
    return status.st_ino, status.st_size, status.st_mtime_ns


def _runs(shape: tuple[int, ...], slices: tuple[slice, ...]) -> Iterator[tuple[int, int]]:
    """Yield (first element, count) of the unbroken stretches of a slice, in its order."""
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
    """Write a safetensors file beside its place and move it there when it is whole.

    The header is padded so that tensors begin at multiples of 64 bytes, where their sizes are such:
    a model that maps the file then computes on aligned memory. One tensor is copied at a time.

    Args:
        path: where it goes.
        tensors: on the CPU; on meta with `read`.
        read: gives each tensor when it is written, in the order of the file.
    """
    # The largest elements first keeps every tensor at a multiple of its element size; those that
    # end where the next one may begin come before the others.
    order = sorted(tensors, key=lambda name: (*_alignment(tensors[name]), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name in order:
        tensor = tensors[name]
        end = place + tensor.numel() * tensor.dtype.itemsize
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [place, end],
        }
        place = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN_BYTES)
    partial = path.with_name(partial_name(path.name))
    with partial.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            values = tensors[name] if read is None else read(name)
            file.write(_view_bytes(values.detach().contiguous()))
    os.replace(partial, path)

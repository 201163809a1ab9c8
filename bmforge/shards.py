"""Access to the local shard of a tensor; no other module reads a DTensor's internals.

Initialization, loading and checkpointing all need to know which rectangular region (box) of the
global tensor a rank holds, and where its values are. A box is one (offset, length) pair per tensor
dim; the box of a tensor that is not a DTensor is the whole tensor. Values are in the tensor's own
memory or in a different storage (`Source`).
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from bmforge.records import TensorStorage, metadata_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "Box",
    "Source",
    "is_distributed",
    "is_first_replica",
    "is_streamed",
    "is_torchao",
    "shard_like",
    "local_box",
    "local_tensor",
    "put_values_",
    "sample_places",
    "sample_values",
    "source_of",
    "whole_tensor",
]

# Number of values per tensor that are compared to distinguish models.
_SAMPLES = 64


@dataclass(frozen=True)
class Box:
    """A rectangular region of a global tensor, with one offset and one length per dim."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements in the box (1 for a scalar)."""
        return math.prod(self.lengths)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Slices that select the box from the global tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.lengths, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Return the intersection of two boxes of one global tensor, or None if it is empty."""
        starts = [max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True)]
        ends = [
            min(a + n, b + m)
            for a, n, b, m in zip(
                self.offsets, self.lengths, other.offsets, other.lengths, strict=True
            )
        ]
        if any(e <= s for s, e in zip(starts, ends, strict=True)):
            return None
        return Box(tuple(starts), tuple(e - s for s, e in zip(starts, ends, strict=True)))

    def relative_to(self, origin: Box) -> Box:
        """Return this box with its offsets relative to those of `origin`."""
        offsets = tuple(a - b for a, b in zip(self.offsets, origin.offsets, strict=True))
        return Box(offsets, self.lengths)


def is_distributed(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return True for a DTensor.

    The function does not import torch.distributed.tensor, which takes longer than importing torch:
    no DTensor can exist before another module has imported it.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the local shard of `tensor`: a view that shares its storage."""
    return tensor.to_local() if is_distributed(tensor) else tensor


def shard_like(local: Tensor, pattern: Tensor) -> Tensor:
    """Return a tensor that is sharded like `pattern` and whose local shard is `local`.

    If `pattern` is not a DTensor, `local` itself is returned.
    """
    if not is_distributed(pattern):
        return local
    return type(pattern).from_local(
        local,
        pattern.device_mesh,
        pattern.placements,
        run_check=False,
        shape=pattern.shape,
        stride=pattern.stride(),
    )


def is_streamed(tensor: Tensor) -> bool:
    """Return True if a parameter's values are streamed when its block runs.

    The parameter's own memory is then not valid; use `source_of` or `whole_tensor` to read it.
    """
    return metadata_of(tensor).origin is not None


def local_box(tensor: Tensor) -> Box:
    """Return this rank's box of the global tensor; its lengths may be 0."""
    if not is_distributed(tensor):
        return Box((0,) * tensor.dim(), tuple(tensor.shape))
    chunks = tensor.__create_chunk_list__()
    if not chunks:
        return Box((0,) * tensor.dim(), tuple(tensor.to_local().shape))
    return Box(tuple(chunks[0].offsets), tuple(chunks[0].sizes))


def is_first_replica(tensor: Tensor, leads: bool) -> bool:
    """Return True on exactly one of the ranks that have the same shard.

    Args:
        tensor: a DTensor, or another tensor that is replicated over several ranks.
        leads: whether this rank is the first of the ranks that hold the replicated tensor.
    """
    if not is_distributed(tensor):
        return leads
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    return all(
        position == 0
        for position, placement in zip(coordinate, tensor.placements, strict=True)
        if placement.is_replicate()
    )


@dataclass(frozen=True)
class Source:
    """The local values of a tensor, in its own memory or in a different storage.

    Args:
        pattern: tensor that defines shape and sharding, and has the values if there is no keeper.
        keeper: storage of the values; None if they are in the tensor's own memory.
    """

    pattern: Tensor
    keeper: TensorStorage | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the stored data, which may be wider than the dtype of the parameter."""
        return self.pattern.dtype if self.keeper is None else self.keeper.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the local shard."""
        return tuple(local_tensor(self.pattern).shape)

    @property
    def is_late(self) -> bool:
        """True if the values are on disk, so that reading is deferred until they are needed."""
        return self.keeper is not None and self.keeper.is_on_disk

    @property
    def size_bytes(self) -> int:
        """Size of the local values in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> Tensor:
        """Return the values as a contiguous CPU tensor, which may share the tensor's memory."""
        if self.keeper is None:
            return local_tensor(self.pattern.detach()).cpu().contiguous()
        values = torch.empty(self.shape, dtype=self.dtype)
        self.keeper.fill(values)
        return values

    def taken(self) -> Source:
        """Return a snapshot that later changes of the tensor do not affect.

        If the values are on disk, the source itself is returned, and the values must not change
        before they are read.
        """
        if self.is_late:
            return self
        if self.keeper is not None:
            return Source(self.read())
        host = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        return Source(host.copy_(local_tensor(self.pattern.detach())))


def source_of(tensor: Tensor) -> Source:
    """Return the source of a tensor's values: the master copy, if the tensor has one."""
    side = metadata_of(tensor)
    return Source(tensor, side.master or side.origin)


@torch.no_grad()
def put_values_(tensor: Tensor, values: Tensor) -> None:
    """Write this rank's values of a tensor into its memory or its storages."""
    side = metadata_of(tensor)
    if side.origin is None:
        local_tensor(tensor).copy_(values)
    if side.master is not None:
        side.master.put(0, values)


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return the values of the whole global tensor, in its dtype.

    Comm: an all-gather if the tensor is sharded.
    """
    origin = metadata_of(tensor).origin
    if origin is not None:
        values = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        origin.fill(values)
        return values
    tensor = tensor.detach()
    return tensor.full_tensor() if is_distributed(tensor) else tensor


def sample_places(name: str, count: int) -> list[int]:
    """Return pseudo-random element indices of a tensor, seeded by its name; some may repeat.

    Args:
        name: name of the tensor.
        count: number of elements of the tensor.
    """
    seed = hashlib.sha256(name.encode()).digest()
    digests = (
        hashlib.blake2b(seed, digest_size=8, salt=bytes([i])).digest() for i in range(_SAMPLES)
    )
    return [int.from_bytes(digest, "little") % count for digest in digests]


def digest_samples(samples: Iterable[tuple[str, tuple[int, ...], Tensor]]) -> str:
    """Return a hash of sampled weights as 16 hexadecimal digits; floats are hashed as bf16.

    Args:
        samples: name, shape, and sampled values of each parameter (see `sample_places`).
    """
    digest = hashlib.sha256()
    for name, shape, values in samples:
        values = values.to(torch.bfloat16) if values.is_floating_point() else values
        digest.update(f"{name} {shape}".encode())
        digest.update(values.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


@torch.no_grad()
def sample_values(name: str, tensor: Tensor) -> dict[int, bytes]:
    """Return this rank's values at the indices of `sample_places`; floats are read as bf16.

    Args:
        name: name of the tensor.
        tensor: tensor in any layout; a streamed one is read completely.

    Returns:
        dictionary from index to the bytes of the value.
    """
    source, box = source_of(tensor), local_box(tensor)
    if not box.numel or not tensor.numel():
        return {}
    local = local_tensor(tensor.detach()) if source.keeper is None else source.read()
    if hasattr(local, "__tensor_flatten__"):
        local = local.dequantize()
    indices = {}
    for flat in set(sample_places(name, tensor.numel())):
        index, remaining = [], flat
        for size, offset, length in zip(
            reversed(tensor.shape), reversed(box.offsets), reversed(box.lengths), strict=True
        ):
            remaining, inside = divmod(remaining, size)
            index.append(inside - offset if offset <= inside < offset + length else None)
        if None not in index:
            indices[flat] = tuple(reversed(index))
    if not indices:
        return {}
    local = local.reshape(box.lengths)
    picked = torch.stack([local[index] for index in indices.values()])
    picked = picked.to(torch.bfloat16) if picked.is_floating_point() else picked
    rows = picked.cpu().contiguous().view(torch.uint8).reshape(len(indices), -1)
    return {flat: bytes(row.tolist()) for flat, row in zip(indices, rows, strict=True)}


def is_torchao(weight: Tensor) -> bool:
    """Return True if a tensor is an instance of one of torchao's tensor subclasses."""
    return type(weight).__module__.partition(".")[0] == "torchao"

"""Which part of a global tensor this process holds: the one place that looks inside a DTensor.

Initialising, loading and checkpointing all ask the same questions: "which box of the whole tensor
is here?", and "where are its values?". A box is one (offset, length) pair per tensor dim. A plain
tensor's box is the whole tensor. Values are in the tensor's own memory, or somebody keeps them
elsewhere (`Source`).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from bmforge.records import Keeper, side_of

__all__ = [
    "Box",
    "Source",
    "is_first_replica",
    "is_streamed",
    "laid_out_like",
    "local_box",
    "local_tensor",
    "put_values_",
    "sample_places",
    "sample_values",
    "source_of",
    "whole_tensor",
]

# So many numbers of a tensor tell it from others.
_SAMPLES = 64


@dataclass(frozen=True)
class Box:
    """A rectangular part of a global tensor: `offsets` and `lengths`, one number per dim."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements in the box (1 for a scalar)."""
        return math.prod(self.lengths)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into the global tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.lengths, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Return the common part of two boxes of one global tensor, or None."""
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
        """Return this box with `origin`'s corner as the zero point."""
        offsets = tuple(a - b for a, b in zip(self.offsets, origin.offsets, strict=True))
        return Box(offsets, self.lengths)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the part of `tensor` that lives here: a view that shares its storage."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def laid_out_like(local: Tensor, pattern: Tensor) -> Tensor:
    """Return the tensor of `pattern`'s layout whose part on this process is `local`.

    Beside a plain `pattern` that is `local` itself.
    """
    if not isinstance(pattern, DTensor):
        return local
    return DTensor.from_local(
        local,
        pattern.device_mesh,
        pattern.placements,
        run_check=False,
        shape=pattern.shape,
        stride=pattern.stride(),
    )


def is_streamed(tensor: Tensor) -> bool:
    """Tell whether a parameter's values live elsewhere and come when its block runs.

    Its own memory then says nothing; `source_of` and `whole_tensor` read the values.
    """
    return side_of(tensor).origin is not None


def local_box(tensor: Tensor) -> Box:
    """Return the box of the global tensor that this process holds (lengths may be 0)."""
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.dim(), tuple(tensor.shape))
    chunks = tensor.__create_chunk_list__()
    if not chunks:
        return Box((0,) * tensor.dim(), tuple(tensor.to_local().shape))
    return Box(tuple(chunks[0].offsets), tuple(chunks[0].sizes))


def is_first_replica(tensor: Tensor, leads: bool) -> bool:
    """True on the one process, among those with the same box, that should write it.

    Args:
        tensor: a DTensor, or a plain tensor that several processes hold whole.
        leads: whether this process is the first of those.
    """
    if not isinstance(tensor, DTensor):
        return leads
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    return all(
        position == 0
        for position, placement in zip(coordinate, tensor.placements, strict=True)
        if isinstance(placement, Replicate)
    )


@dataclass(frozen=True)
class Source:
    """The values of a tensor's part on this process, wherever they are.

    Args:
        pattern: tells shape and layout; has the values itself, unless there is a
        keeper: of the values, elsewhere.
    """

    pattern: Tensor
    keeper: Keeper | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the values, which may be wider than the tensor's."""
        return self.pattern.dtype if self.keeper is None else self.keeper.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part that is here."""
        return tuple(local_tensor(self.pattern).shape)

    @property
    def is_late(self) -> bool:
        """Whether reading takes a disk, so that it is put off until the values are needed."""
        return self.keeper is not None and self.keeper.is_on_disk

    @property
    def size_bytes(self) -> int:
        """Of the part that is here."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> Tensor:
        """Return a contiguous host tensor, which may be the tensor's own memory."""
        if self.keeper is None:
            return local_tensor(self.pattern.detach()).cpu().contiguous()
        values = torch.empty(self.shape, dtype=self.dtype)
        self.keeper.fill(values)
        return values

    def taken(self) -> Source:
        """Return the same for whoever reads it after the tensor has changed: a copy, unless late.

        Late values may not change before they have been read.
        """
        if self.is_late:
            return self
        if self.keeper is not None:
            return Source(self.read())
        host = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        return Source(host.copy_(local_tensor(self.pattern.detach())))


def source_of(tensor: Tensor) -> Source:
    """Return where a tensor's values are; of several places the one that training steps."""
    side = side_of(tensor)
    return Source(tensor, side.master or side.origin)


@torch.no_grad()
def put_values_(tensor: Tensor, values: Tensor) -> None:
    """Give a tensor this process's part of its values, wherever they are kept."""
    side = side_of(tensor)
    if side.origin is None:
        local_tensor(tensor).copy_(values)
    if side.master is not None:
        side.master.put(0, values)


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return all values of a tensor, in its dtype.

    Comm: an all-gather where it is sharded.
    """
    origin = side_of(tensor).origin
    if origin is not None:
        values = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        origin.fill(values)
        return values
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sample_places(name: str, count: int) -> list[int]:
    """Return some places among a tensor's numbers, drawn from its name; one may come twice.

    Args:
        name: of the tensor.
        count: of its numbers.
    """
    seed = hashlib.sha256(name.encode()).digest()
    drawn = (
        hashlib.blake2b(seed, digest_size=8, salt=bytes([i])).digest() for i in range(_SAMPLES)
    )
    return [int.from_bytes(one, "little") % count for one in drawn]


@torch.no_grad()
def sample_values(name: str, tensor: Tensor) -> dict[int, bytes]:
    """Return the numbers at `sample_places` that this process holds, floats as bf16.

    Args:
        name: of the tensor.
        tensor: laid out in any way; streamed too, of which all is read then.

    Returns:
        place -> bytes of the number.
    """
    source, box = source_of(tensor), local_box(tensor)
    if not box.numel or not tensor.numel():
        return {}
    local = local_tensor(tensor.detach()) if source.keeper is None else source.read()
    if hasattr(local, "__tensor_flatten__"):
        local = local.dequantize()
    found = {}
    for place in set(sample_places(name, tensor.numel())):
        index, left = [], place
        for size, offset, length in zip(
            reversed(tensor.shape), reversed(box.offsets), reversed(box.lengths), strict=True
        ):
            left, inside = divmod(left, size)
            index.append(inside - offset if offset <= inside < offset + length else None)
        if None not in index:
            found[place] = tuple(reversed(index))
    if not found:
        return {}
    local = local.reshape(box.lengths)
    picked = torch.stack([local[index] for index in found.values()])
    picked = picked.to(torch.bfloat16) if picked.is_floating_point() else picked
    rows = picked.cpu().contiguous().view(torch.uint8).reshape(len(found), -1)
    return {place: bytes(row.tolist()) for place, row in zip(found, rows, strict=True)}

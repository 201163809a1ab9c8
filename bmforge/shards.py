"""Which part of a global tensor this process holds: the one place that looks inside a DTensor.

Initialising, loading and checkpointing all ask the same question: "which box of the whole tensor is
here?". A box is one (offset, length) pair per tensor dim. A plain tensor's box is the whole tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

__all__ = [
    "Box",
    "is_first_replica",
    "is_streamed",
    "laid_out_like",
    "local_box",
    "local_tensor",
]


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

    Its own memory then says nothing; ``tensor.read_streamed(out)`` reads the values.
    """
    return hasattr(tensor, "read_streamed")


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

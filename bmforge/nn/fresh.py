"""Products and sums in the place of a tensor that nobody else has seen yet.

Large results come from the system page by page: faulting one in costs several times what computing
it does. Where nothing follows torch's operations and no gradient will ask, the first operand's
memory takes the result, with the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bmforge.nn.products import is_watched

__all__ = ["add_fresh", "multiply_fresh"]


# Below that memory costs less than asking.
_FEWEST_NUMBERS = 1 << 14


def multiply_fresh(fresh: Tensor, other: Tensor, made_of: Tensor | None = None) -> Tensor:
    """Return ``fresh * other``.

    Args:
        fresh: made a moment ago and known to the caller alone, who forgets it.
        other: what broadcasts with it.
        made_of: which a function of somebody else's made it of, and may have returned as it was.
    """
    if not _may_overwrite(fresh, other):
        return fresh * other
    if made_of is not None and fresh.data_ptr() == made_of.data_ptr():
        return fresh * other
    return fresh.mul_(other)


def add_fresh(fresh: Tensor, other: Tensor) -> Tensor:
    """Return ``fresh + other``; see `multiply_fresh`."""
    return fresh.add_(other) if _may_overwrite(fresh, other) else fresh + other


def _may_overwrite(fresh: Tensor, other: Tensor) -> bool:
    if torch.is_grad_enabled() or is_watched():
        return False
    plain = type(fresh) is Tensor and type(other) is Tensor and fresh.dtype == other.dtype
    if not plain or fresh.numel() < _FEWEST_NUMBERS:
        return False
    return torch.broadcast_shapes(fresh.shape, other.shape) == fresh.shape

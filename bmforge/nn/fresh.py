"""In-place mul and add into a temporary operand when autograd and tracing are off.

Large results come from the operating system page by page: a page fault costs several times what the
arithmetic does. The result overwrites the first operand's memory, with the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bmforge.nn.products import is_watched

__all__ = ["add_fresh", "multiply_fresh"]


# Below this size the check costs more than the memory.
_FEWEST_NUMBERS = 1 << 14


def multiply_fresh(fresh: Tensor, other: Tensor, made_of: Tensor | None = None) -> Tensor:
    """Return ``fresh * other``, in the memory of `fresh` where possible.

    Args:
        fresh: temporary tensor that only the caller has and does not use again.
        other: tensor that broadcasts to it.
        made_of: input of the function that returned `fresh`; that function may have returned it.
    """
    if not _may_overwrite(fresh, other):
        return fresh * other
    if made_of is not None and fresh.data_ptr() == made_of.data_ptr():
        return fresh * other
    return fresh.mul_(other)


def add_fresh(fresh: Tensor, other: Tensor) -> Tensor:
    """Return ``fresh + other``, in the memory of `fresh` where possible; see `multiply_fresh`."""
    return fresh.add_(other) if _may_overwrite(fresh, other) else fresh + other


def _may_overwrite(fresh: Tensor, other: Tensor) -> bool:
    if torch.is_grad_enabled() or is_watched():
        return False
    plain = type(fresh) is Tensor and type(other) is Tensor and fresh.dtype == other.dtype
    if not plain or fresh.numel() < _FEWEST_NUMBERS:
        return False
    return torch.broadcast_shapes(fresh.shape, other.shape) == fresh.shape

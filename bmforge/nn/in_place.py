"""In-place mul and add into a temporary tensor, used when autograd and tracing are off.

A large new tensor is allocated page by page, and the page faults cost several times as much as the
arithmetic. Instead the result, which is bit-identical, overwrites the first operand.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bmforge.nn.tracing import is_tracing

__all__ = ["add_temporary", "multiply_temporary"]


# Below this size the check costs more than allocating a new tensor.
_FEWEST_NUMBERS = 1 << 14


def multiply_temporary(temporary: Tensor, other: Tensor, made_of: Tensor | None = None) -> Tensor:
    """Return ``temporary * other``, written into the memory of `temporary` if possible.

    Args:
        temporary: tensor to which only the caller has a reference and which is not used again.
        other: tensor that broadcasts to the shape of `temporary`.
        made_of: input of the function that returned `temporary`; if both are the same tensor,
            `temporary` is not overwritten.
    """
    if not _can_overwrite(temporary, other):
        return temporary * other
    if made_of is not None and temporary.data_ptr() == made_of.data_ptr():
        return temporary * other
    return temporary.mul_(other)


def add_temporary(temporary: Tensor, other: Tensor) -> Tensor:
    """Return ``temporary + other`` in the memory of `temporary`; see `multiply_temporary`."""
    return temporary.add_(other) if _can_overwrite(temporary, other) else temporary + other


def _can_overwrite(temporary: Tensor, other: Tensor) -> bool:
    if torch.is_grad_enabled() or is_tracing():
        return False
    plain = type(temporary) is Tensor and type(other) is Tensor and temporary.dtype == other.dtype
    if not plain or temporary.numel() < _FEWEST_NUMBERS:
        return False
    return torch.broadcast_shapes(temporary.shape, other.shape) == temporary.shape

"""Grouped matrix multiplication: one matrix per group of rows, for MoE layers.

The rows of an expert are adjacent, and ``ends[e]`` is the index after expert e's last row. The
group sizes are data-dependent, so the loop over groups is a custom operator with a registered
gradient, which `torch.compile` does not trace. If the device has a grouped kernel, it is used.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["grouped_linear", "take_rows"]

# The grouped kernel requires rows aligned to 16 bytes.
_ALIGNED_ELEMENTS = 8


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply every group of rows by its own matrix: ``x[group e] @ weight[e].T``.

    Args:
        x: rows sorted by group.
        weight: one matrix per group.
        ends: index after the last row of each group, non-decreasing; the last entry is S.

    Shape:
        x: (S, D); weight: (E, F, D); ends: (E,), integers; returns (S, F)
    """
    if _has_kernel(x, weight):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends.to(torch.int32))
    return _grouped_linear(x, weight, ends)


def _has_kernel(x: Tensor, weight: Tensor) -> bool:
    """Return True if torch's grouped matmul supports these tensors and beats a loop over groups.

    On a CPU the grouped matmul is itself a loop (torch 2.13), and only bf16 has a meta kernel,
    which torch.compile needs.
    """
    is_aligned = all(size % _ALIGNED_ELEMENTS == 0 for size in weight.shape[1:])
    return not x.is_cpu and x.dtype == weight.dtype == torch.bfloat16 and is_aligned


@torch.library.custom_op(
    "bmforge::grouped_linear",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor ends) -> Tensor",
)
def _grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[1])
    sizes = _sizes(ends)
    parts = zip(x.split(sizes), weight.transpose(1, 2).unbind(), out.split(sizes), strict=True)
    for rows, matrix, target in parts:
        if len(rows):
            torch.mm(rows, matrix, out=target)
    return out


@torch.library.custom_op(
    "bmforge::grouped_outer",
    mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor ends) -> Tensor",
)
def _grouped_outer(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Return the gradient of the stacked matrices, ``grad[group e].T @ x[group e]``: (E, F, D)."""
    out = grad.new_empty(ends.shape[0], grad.shape[1], x.shape[1])
    sizes = _sizes(ends)
    for left, right, target in zip(grad.split(sizes), x.split(sizes), out.unbind(), strict=True):
        torch.mm(left.t(), right, out=target)
    return out


def _sizes(ends: Tensor) -> list[int]:
    """Return the number of rows of every group."""
    borders = [0, *ends.tolist()]
    return [end - start for start, end in itertools.pairwise(borders)]


@_grouped_linear.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@_grouped_outer.register_fake
def _(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return grad.new_empty(ends.shape[0], grad.shape[1], x.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    x, weight, ends = inputs
    need_x, need_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if need_weight else None, weight if need_x else None, ends)


def _grouped_linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, ends = ctx.saved_tensors
    grad_x = None if weight is None else grouped_linear(grad, weight.transpose(1, 2), ends)
    grad_weight = None if x is None else _grouped_outer(grad, x, ends)
    return grad_x, grad_weight, None


_grouped_linear.register_autograd(_grouped_linear_backward, setup_context=_keep)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.rows = x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (positions,) = ctx.saved_tensors
        grad = grads[0].index_select(0, positions)
        if grad.shape[0] != ctx.rows:
            grad = grad.unflatten(0, (ctx.rows, -1)).sum(1)
        return grad, None, None


def take_rows(x: Tensor, index: Tensor, places: Tensor) -> Tensor:
    """Return ``x[index]``, where `index` contains every row of x the same number of times.

    With the positions of the copies (`places`), the backward is a gather and a sum in fixed order,
    several times faster than the scatter-add in the backward of ``x[index]``.

    Shape:
        x: (M, D); index, places: (M * k,), the copies of x[m] at ``places[m * k : m * k + k]``
    """
    return _TakeRows.apply(x, index, places)

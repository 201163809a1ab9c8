"""Tensor-parallel linear layers for modules of other libraries, which have no bmforge hooks.

In bmforge's blocks each sublayer (attention, MLP) sums the gradient of its input once. Modules of
other libraries have no hook for this, so every column-sharded layer sums its own input gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.nn.dense_weight import is_conv1d
from bmforge.parallel.collectives import all_gather
from bmforge.parallel.tensor.parts import TensorGroup, add_up_
from bmforge.surgery import wrap_forward_

__all__ = ["FOREIGN_STYLES", "supports_foreign_style"]


class _GatherColumns(torch.autograd.Function):
    """All-gathers the last dim; backward returns the gradient of the local columns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: TensorGroup) -> Tensor:
        ctx.first, ctx.width = tensor.rank * x.shape[-1], x.shape[-1]
        return all_gather(x, tensor.group, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # All processes use the gathered tensor in the same way, so each has its whole gradient.
        return grads[0].narrow(-1, ctx.first, ctx.width), None


class _SplitColumns(torch.autograd.Function):
    """Selects this process's columns of a replicated tensor; backward gathers all columns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: TensorGroup) -> Tensor:
        ctx.tensor, width = tensor, x.shape[-1] // tensor.size
        return x.narrow(-1, tensor.rank * width, width).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # Each process has the gradient of its own columns only.
        return all_gather(grads[0], ctx.tensor.group, -1), None


def _sum_input_gradient(tensor: TensorGroup, module: Any, args: tuple[Any, ...]) -> Any:
    return (tensor.sum_backward(args[0]), *args[1:])


def _gather_outputs(tensor: TensorGroup, module: Any, args: Any, out: Tensor) -> Tensor:
    return _GatherColumns.apply(out, tensor)


def _split_input(tensor: TensorGroup, module: Any, args: tuple[Any, ...]) -> Any:
    return (_SplitColumns.apply(args[0], tensor), *args[1:])


def _sum_tail_gradient(tensor: TensorGroup, width: int, module: Any, args: Any, out: Tensor) -> Any:
    return torch.cat((out[..., :-width], tensor.sum_backward(out[..., -width:])), -1)


def _multiply_columns(module: Any, inner: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Compute the local columns of a Conv1D, whose own forward returns a fixed width."""
    # A Conv1D stores its weight as (inputs, outputs).
    return F.linear(x, module.weight.t(), module.bias)


def _apply_own_column_(module: nn.Module, tensor: TensorGroup, units: int) -> None:
    """All-reduce the input gradient of a column-sharded layer."""
    module.register_forward_pre_hook(partial(_sum_input_gradient, tensor))
    if is_conv1d(module):
        wrap_forward_(module, partial(_multiply_columns, module), "part")


def _apply_gathered_column_(module: nn.Module, tensor: TensorGroup, units: int) -> None:
    """All-reduce the input gradient of a column-sharded layer, and all-gather its output."""
    _apply_own_column_(module, tensor, units)
    module.register_forward_hook(partial(_gather_outputs, tensor))


def _apply_split_row_(module: nn.Module, tensor: TensorGroup, units: int) -> None:
    """Use this process's columns of a replicated input, and all-reduce the partial products."""
    module.register_forward_pre_hook(partial(_split_input, tensor))
    add_up_(module, tensor)


def _apply_shared_tail_(module: nn.Module, tensor: TensorGroup, units: int) -> None:
    """All-reduce the gradient of the trailing outputs that the heads of all processes share.

    Multi-head latent attention has one rotary key for all heads; each process computes the gradient
    from its own heads. The other outputs enter a column-sharded layer, which sums their gradient.
    """
    module.register_forward_hook(partial(_sum_tail_gradient, tensor, units))


def supports_foreign_style(module: nn.Module, style: str) -> bool:
    """Return True if a layer of another library can be sharded in one of `FOREIGN_STYLES`."""
    if is_conv1d(module):
        return style in ("own_column", "gathered_column")
    return isinstance(module, nn.Linear)


FOREIGN_STYLES: dict[str, Callable[[nn.Module, TensorGroup, int], None]] = {
    "own_column": _apply_own_column_,
    "gathered_column": _apply_gathered_column_,
    "split_row": _apply_split_row_,
    "shared_tail": _apply_shared_tail_,
}

"""Collectives that know their gradient: what a tensor goes through where a cut begins or ends.

Each has a twin in backward: what is copied forward is summed backward, what is gathered forward is
summed and cut backward, and the other way round. On a group of one, none of them does anything.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "all_gather",
    "all_reduce",
    "cut_evenly",
    "exchange_rows",
    "gather_into",
    "gather_tokens",
    "own_gradient",
    "reduce_scatter",
    "sum_backward",
    "sum_forward",
    "sum_scatter_tokens",
    "take_tokens",
]

Group: TypeAlias = dist.ProcessGroup
# Their names before torch 2.13.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(x: Tensor, group: Group, dim: int) -> Tensor:
    """Return all processes' equally shaped `x`, one behind the other along `dim`; no gradient."""
    front = x.movedim(dim, 0).contiguous()
    out = front.new_empty(group.size() * front.shape[0], *front.shape[1:])
    gather_into(out, front, group=group)
    return out.movedim(0, dim).contiguous()


def reduce_scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    """Sum `x` over the processes and return this one's equal part along `dim`; no gradient."""
    front = x.movedim(dim, 0).contiguous()
    out = front.new_empty(front.shape[0] // group.size(), *front.shape[1:])
    _scatter_into(out, front, group=group)
    return out.movedim(0, dim)


def cut_evenly(x: Tensor, group: Group, dim: int) -> Tensor:
    """Return this process's equal part of `x` along `dim`."""
    return x.chunk(group.size(), dim)[group.rank()]


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Return the sum of all processes' `x`; no gradient."""
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grads[0], ctx.group), None


class _OwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].clone()


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, summed: bool) -> Tensor:
        ctx.group, ctx.dim, ctx.summed = group, dim, summed
        return all_gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        back = reduce_scatter if ctx.summed else cut_evenly
        return back(grads[0], ctx.group, ctx.dim), None, None, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return cut_evenly(x, group, dim).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grads[0], ctx.group, ctx.dim), None, None


class _SumScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return reduce_scatter(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grads[0], ctx.group, ctx.dim), None, None


def own_gradient(x: Tensor) -> Tensor:
    """Pass on `x`; its gradient is a tensor of its own.

    What is added to without a sum (positions, to one row) gets the very gradient that goes on to
    others. Autograd copies such a one before it adds to it, but not inside a DTensor.
    """
    return _OwnGradient.apply(x)


def sum_backward(x: Tensor, group: Group) -> Tensor:
    """Pass on what all processes have, from which each computes its part.

    Comm: backward, one all-reduce of `x`'s bytes.
    """
    return _SumBackward.apply(x, group)


def sum_forward(x: Tensor, group: Group) -> Tensor:
    """Sum the processes' parts; all go on with the same.

    Comm: forward, one all-reduce of `x`'s bytes.
    """
    return _SumForward.apply(x, group)


def gather_tokens(x: Tensor, group: Group, dim: int = 1, *, summed: bool) -> Tensor:
    """Gather what each process has some tokens of.

    Args:
        x: this process's tokens, equally many on each.
        group: the processes.
        dim: which dim of `x` counts tokens.
        summed: each process computes a part from all tokens, so that gradients are summed; else all
            go on with the same, and each keeps the gradient of its own tokens.

    Comm: forward, one all-gather; backward, where `summed`, one reduce-scatter.
    """
    return _Gather.apply(x, group, dim, summed)


def take_tokens(x: Tensor, group: Group, dim: int = 1) -> Tensor:
    """Go on with this process's tokens of what all have.

    Comm: backward, one all-gather.
    """
    return _Take.apply(x, group, dim)


def sum_scatter_tokens(x: Tensor, group: Group, dim: int = 1) -> Tensor:
    """Sum the processes' parts; each goes on with its tokens.

    Comm: forward, one reduce-scatter; backward, one all-gather.
    """
    return _SumScatter.apply(x, group, dim)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, sent: list[int], received: list[int]) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return _exchange(x, group, sent, received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grads[0], ctx.group, ctx.received, ctx.sent), None, None, None


def _exchange(x: Tensor, group: Group, sent: list[int], received: list[int]) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


def exchange_rows(x: Tensor, group: Group, sent: list[int], received: list[int]) -> Tensor:
    """Send rows to their processes; return what came, in the order of the processes it came from.

    Args:
        x: rows, in the order of the processes they go to.
        group: the processes.
        sent: how many rows go to each.
        received: how many come from each.

    Comm: one all-to-all forward, one backward.
    """
    return _Exchange.apply(x, group, sent, received)

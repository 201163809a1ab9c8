"""Differentiable collectives at the boundaries of the model's sharded regions.

Every collective has a counterpart in backward: the backward of a copy is a sum, the backward of a
gather is a reduce-scatter, and vice versa. In a group of one process the collectives do nothing.
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
    "split_softmax",
    "sum_backward",
    "sum_forward",
    "sum_scatter_tokens",
    "take_tokens",
]

Group: TypeAlias = dist.ProcessGroup
# Before torch 2.13 these functions had longer names.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(x: Tensor, group: Group, dim: int) -> Tensor:
    """Concatenate `x`, of equal shape on all processes, along `dim`; not differentiable."""
    # Collectives concatenate whole buffers, which is concatenation along dim 0 only.
    front = x.movedim(dim, 0).contiguous()
    out = front.new_empty(group.size() * front.shape[0], *front.shape[1:])
    gather_into(out, front, group=group)
    return out.movedim(0, dim).contiguous()


def reduce_scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    """Sum `x` over processes and return this rank's chunk along `dim`; not differentiable."""
    front = x.movedim(dim, 0).contiguous()
    out = front.new_empty(front.shape[0] // group.size(), *front.shape[1:])
    _scatter_into(out, front, group=group)
    return out.movedim(0, dim)


def cut_evenly(x: Tensor, group: Group, dim: int) -> Tensor:
    """Split `x` along `dim` into equal chunks, and return this rank's chunk."""
    return x.chunk(group.size(), dim)[group.rank()]


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Return the sum of `x` over all processes; not differentiable."""
    # The collective is in place, and autograd or the caller may still need `x`.
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
        # Each process used the copy with its own shard of a weight, so each has a part of the
        # gradient.
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
        # Every process continues with the same sum, so each already has the whole gradient of its
        # summand.
        return grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, summed: bool) -> Tensor:
        ctx.group, ctx.dim, ctx.summed = group, dim, summed
        return all_gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        # See `gather_tokens`: partial gradients must be summed, replicated ones must not.
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
    """Return `x` unchanged; its gradient tensor shares no memory with other gradients.

    An addition without a reduction (position embeddings of a single row) passes the same gradient
    tensor to all its inputs. Autograd copies a shared gradient before it accumulates into it,
    except inside a DTensor.
    """
    return _OwnGradient.apply(x)


def sum_backward(x: Tensor, group: Group) -> Tensor:
    """Return the replicated `x` unchanged; all-reduce its gradient in backward.

    Comm: backward, one all-reduce of `x`'s bytes.
    """
    return _SumBackward.apply(x, group)


def sum_forward(x: Tensor, group: Group) -> Tensor:
    """All-reduce `x` in forward; pass its gradient through unchanged in backward.

    Comm: forward, one all-reduce of `x`'s bytes.
    """
    return _SumForward.apply(x, group)


def gather_tokens(x: Tensor, group: Group, dim: int = 1, *, summed: bool) -> Tensor:
    """All-gather tokens that are sharded over the processes.

    Args:
        x: tokens of this process, the same number on each.
        group: process group.
        dim: token dim of `x`.
        summed: True if each process computes a partial result from all tokens, so that gradients
            are summed; False if the following computation is replicated, so that each process keeps
            the gradient of its own tokens.

    Comm: forward, one all-gather; backward, if `summed`, one reduce-scatter.
    """
    return _Gather.apply(x, group, dim, summed)


def take_tokens(x: Tensor, group: Group, dim: int = 1) -> Tensor:
    """Return this rank's shard of a replicated tensor along the token dim.

    Comm: backward, one all-gather.
    """
    return _Take.apply(x, group, dim)


def sum_scatter_tokens(x: Tensor, group: Group, dim: int = 1) -> Tensor:
    """Reduce-scatter `x`: sum over the processes, and return this rank's tokens.

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
        # The gradients go back the way the rows came.
        return _exchange(grads[0], ctx.group, ctx.received, ctx.sent), None, None, None


def _exchange(x: Tensor, group: Group, sent: list[int], received: list[int]) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


def exchange_rows(x: Tensor, group: Group, sent: list[int], received: list[int]) -> Tensor:
    """All-to-all of rows; the received rows are ordered by source rank.

    Args:
        x: rows, ordered by destination rank.
        group: process group.
        sent: number of rows sent to each rank.
        received: number of rows received from each rank.

    Comm: one all-to-all forward, one backward.
    """
    return _Exchange.apply(x, group, sent, received)


def split_softmax(logits: Tensor, target: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Return the parts of the log-softmax of logits that are sharded over the vocabulary.

    Args:
        logits: logits of this process's part of the vocabulary; all parts have the same size.
        target: token ids of the full vocabulary, the same on every process.
        group: process group that shards the vocabulary.

    Returns:
        The local logits minus the largest logit, the logarithm of the sum of their exponentials,
        and the logit of the target minus the largest logit. The log-probability of the target is
        the last minus the second.

    Shape:
        logits: (..., V / processes); target: (...); returns (..., V / processes), (...), (...)

    Comm: two all-reduces, of one and of two scalars per row.
    """
    # Subtracting the maximum does not change a softmax, so it needs no gradient.
    largest, width = logits.detach().amax(-1), logits.shape[-1]
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    shifted = logits - largest[..., None]
    index = target.long() - group.rank() * width
    is_local = (index >= 0) & (index < width)
    picked = shifted.gather(-1, index.where(is_local, 0)[..., None])[..., 0] * is_local
    # One all-reduce for both, since a small all-reduce costs latency rather than bandwidth.
    sums = sum_forward(torch.stack((shifted.exp().sum(-1), picked)), group)
    return shifted, sums[0].log(), sums[1]

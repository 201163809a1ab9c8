"""Differentiable collectives.

The result of `all_reduce` or `broadcast` is one replicated value, whose gradient counts once;
gradients of `all_gather` are summed over the processes.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from bmforge.compat.bmtrain.runtime import config
from bmforge.errors import ConfigError, ShapeError
from bmforge.parallel.collectives import gather_tokens, sum_forward, sum_scatter_tokens

__all__ = [
    "all_gather", "all_reduce", "broadcast", "recv_activations", "reduce_scatter",
    "send_activations",
]  # fmt: skip

Op = Literal["sum", "avg", "max", "min", "prod"]
_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_MAX_DIMS = 48


def _group(comm: Any) -> dist.ProcessGroup:
    config.need("bmt.distributed")
    return config["comm"] if comm is None else comm


def all_gather(x: Tensor, comm: Any = None) -> Tensor:
    """All-gather a tensor; return the tensors of all processes, stacked.

    Shape:
        x: (...) -> (world, ...)
    """
    return gather_tokens(x[None], _group(comm), 0, summed=True)


def reduce_scatter(x: Tensor, op: Literal["sum", "avg"] = "sum", comm: Any = None) -> Tensor:
    """Reduce a tensor over the processes; return this process's shard of the result (dim 0).

    Shape:
        x: (R, ...) -> (R / world, ...)

    Raises:
        ConfigError: `op` is neither "sum" nor "avg".
        ShapeError: the number of rows is not divisible by the number of processes.
    """
    group = _group(comm)
    if op not in ("sum", "avg"):
        raise ConfigError(
            f"op={op!r} is not supported by reduce_scatter (supported: 'sum', 'avg'). Use "
            "all_reduce."
        )
    if x.dim() == 0 or x.shape[0] % group.size():
        raise ShapeError(
            f"the first dimension of x, with shape={tuple(x.shape)}, is not divisible by the "
            f"{group.size()} processes. Pad x to a multiple of {group.size()} rows."
        )
    out = sum_scatter_tokens(x, group, 0)
    return out / group.size() if op == "avg" else out


def all_reduce(x: Tensor, op: Op = "sum", comm: Any = None) -> Tensor:
    """Reduce a tensor over the processes; all processes get the same result.

    With "max" and "min", the gradient goes to the process whose value was selected; with "prod",
    the gradient is multiplied by the product of the other processes' values.
    """
    group = _group(comm)
    if op == "sum":
        return sum_forward(x, group)
    if op == "avg":
        return sum_forward(x, group) / group.size()
    if op not in ("max", "min", "prod"):
        raise ConfigError(f"op={op!r} must be one of sum, avg, max, min, prod.")
    # The other processes' values are used without gradient: they get it on their own process.
    others = gather_tokens(x.detach()[None], group, 0, summed=False)
    parts = torch.cat((others[: group.rank()], x[None], others[group.rank() + 1 :]))
    if op == "prod":
        return parts.prod(0)
    return parts.amax(0) if op == "max" else parts.amin(0)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, root: int, group: dist.ProcessGroup) -> Tensor:
        ctx.root, ctx.group = root, group
        out = x.clone(memory_format=torch.contiguous_format)
        dist.broadcast(out, group=group, group_src=root)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        is_root = ctx.group.rank() == ctx.root
        return (total if is_root else torch.zeros_like(total)), None, None


def broadcast(x: Tensor, root: int, comm: Any = None) -> Tensor:
    """Return the tensor of rank `root`, which receives the sum of all gradients."""
    return _Broadcast.apply(x, root, _group(comm))


def send_activations(hidden_state: Tensor, next_rank: int, comm: Any = None) -> None:
    """Send a tensor of any shape, without gradient, to a process that calls `recv_activations`.

    Args:
        hidden_state: tensor of numbers or booleans.
        next_rank: receiving rank in the group.
        comm: process group, such as `config["pipe_comm"]` (default: all processes).

    Raises:
        ShapeError: the tensor has more than 48 dims or an unsupported dtype.
    """
    group = _group(comm)
    if hidden_state.dtype not in _DTYPES or hidden_state.dim() > _MAX_DIMS:
        raise ShapeError(
            f"a tensor of {hidden_state.dtype} with {hidden_state.dim()} dimensions cannot be sent "
            f"(supported: floats, integers and booleans with at most {_MAX_DIMS} dimensions)."
        )
    shape = list(hidden_state.shape)
    numbers = [_DTYPES.index(hidden_state.dtype), len(shape), *shape]
    header = torch.tensor(numbers + [0] * (2 + _MAX_DIMS - len(numbers)), device=config.device)
    dist.send(header, group=group, group_dst=next_rank)
    payload = hidden_state.detach().to(config.device).contiguous().reshape(-1)
    dist.send(payload.view(torch.uint8), group=group, group_dst=next_rank)


def recv_activations(prev_rank: int, comm: Any = None) -> Tensor:
    """Receive the tensor that rank `prev_rank` sends with `send_activations`."""
    group = _group(comm)
    header = torch.zeros(2 + _MAX_DIMS, dtype=torch.int64, device=config.device)
    dist.recv(header, group=group, group_src=prev_rank)
    kind, dims, *shape = header.tolist()
    received = torch.empty(shape[:dims], dtype=_DTYPES[kind], device=config.device)
    dist.recv(received.view(-1).view(torch.uint8), group=group, group_src=prev_rank)
    return received

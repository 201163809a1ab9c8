"""Collectives of mpu at the boundaries of tensor-parallel regions, and its helpers for tensors.

The helpers compute the loss of sharded logits, broadcast a batch, clip gradients, and divide
numbers and tensors into equal parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bmforge.compat.cpm_pretrain.mpu.initialize import (
    get_model_parallel_group,
    get_model_parallel_rank,
    get_model_parallel_src_rank,
    groups,
)
from bmforge.errors import ConfigError, DataError, ShapeError
from bmforge.parallel.collectives import (
    gather_tokens,
    split_softmax,
    sum_backward,
    sum_forward,
    take_tokens,
)

__all__ = [
    "VocabUtility", "broadcast_data", "clip_grad_norm", "copy_to_model_parallel_region", "divide",
    "ensure_divisibility", "gather_from_model_parallel_region", "reduce_from_model_parallel_region",
    "scatter_to_model_parallel_region", "split_tensor_along_last_dim",
    "vocab_parallel_cross_entropy",
]  # fmt: skip


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise an error unless the denominator divides the numerator.

    Raises:
        ConfigError: the denominator does not divide the numerator.
    """
    if numerator % denominator:
        raise ConfigError(
            f"{numerator} is not divisible by {denominator}. Choose a multiple of {denominator}."
        )


def divide(numerator: int, denominator: int) -> int:
    """Return the quotient of two numbers, which must divide evenly."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Split a tensor into equal parts along the last dim; the parts are views by default."""
    parts = tensor.split(divide(tensor.shape[-1], num_partitions), dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


class VocabUtility:
    """Computes the range [first, last) of the vocabulary for a process."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """Return the vocabulary range of a process from the size of each part."""
        return rank * per_partition_vocab_size, (rank + 1) * per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(
        global_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """Return the vocabulary range of a process from the size of the full vocabulary."""
        part = divide(global_vocab_size, world_size)
        return rank * part, (rank + 1) * part


def copy_to_model_parallel_region(input_: Tensor) -> Tensor:
    """Return the input unchanged; backward all-reduces the gradient."""
    return sum_backward(input_, get_model_parallel_group())


def reduce_from_model_parallel_region(input_: Tensor) -> Tensor:
    """All-reduce the input; backward leaves the gradient unchanged."""
    return sum_forward(input_, get_model_parallel_group())


def scatter_to_model_parallel_region(input_: Tensor) -> Tensor:
    """Return this process's part of the last dim of a replicated tensor."""
    return take_tokens(input_, get_model_parallel_group(), -1)


def gather_from_model_parallel_region(input_: Tensor) -> Tensor:
    """All-gather the last dim; all processes get the same result."""
    return gather_tokens(input_, get_model_parallel_group(), -1, summed=False)


def vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor) -> Tensor:
    """Return the loss of every token, equal on all processes; the logits are not modified.

    Args:
        vocab_parallel_logits: logits of this process's part of the vocabulary.
        target: token ids of the full vocabulary.

    Shape:
        vocab_parallel_logits: (..., V / tp); target: (...) -> (...)

    Raises:
        ShapeError: the two shapes do not match.

    Comm: two all-reduces: one scalar per token (maximum), and two (exponential sum, target logit).
    """
    if vocab_parallel_logits.shape[:-1] != target.shape:
        raise ShapeError(
            f"logits have shape {tuple(vocab_parallel_logits.shape)} and targets "
            f"{tuple(target.shape)} (needed: (..., V / tp) and (...))."
        )
    _, log_mass, picked = split_softmax(vocab_parallel_logits, target, get_model_parallel_group())
    return log_mass - picked


def broadcast_data(
    keys: Sequence[str], data: Mapping[str, Tensor] | None, datatype: torch.dtype
) -> dict[str, Tensor]:
    """Broadcast tensors from the first process of the tensor-parallel group to this device.

    Args:
        keys: names of the tensors.
        data: dict from name to tensor; only that of the first process is read.
        datatype: dtype of all tensors.

    Raises:
        DataError: a tensor is missing or has a different dtype; raised on all processes.

    Comm: two broadcasts within the group, of the shapes and of all values.
    """
    group, source = get_model_parallel_group(), get_model_parallel_src_rank()
    is_first = get_model_parallel_rank() == 0
    sent: list[Any] = [_describe(keys, data or {}, datatype) if is_first else None]
    dist.broadcast_object_list(sent, src=source, group=group)
    shapes, problem = sent[0]
    if problem:
        raise DataError(problem)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = torch.empty(sum(sizes), dtype=datatype, device=groups.device)
    if is_first and data is not None:
        torch.cat([data[key].reshape(-1).to(groups.device) for key in keys], out=flat)
    dist.broadcast(flat, src=source, group=group)
    parts = flat.split(sizes)
    return {k: part.view(shape) for k, part, shape in zip(keys, parts, shapes, strict=True)}


def _describe(
    keys: Sequence[str], data: Mapping[str, Tensor], datatype: torch.dtype
) -> tuple[list[tuple[int, ...]], str]:
    """Return the shapes of the tensors, and an error message if a tensor is not valid."""
    missing = [key for key in keys if key not in data]
    if missing:
        return [], (
            f"broadcast_data: the batch lacks {', '.join(missing)} (it has {list(data)}). Add them "
            "to the batch on tensor-parallel rank 0."
        )
    others = [f"{key} is {data[key].dtype}" for key in keys if data[key].dtype != datatype]
    if others:
        return [], (
            f"broadcast_data sends {datatype}, but {', '.join(others)}. Convert the tensors to "
            f"{datatype} first."
        )
    return [tuple(data[key].shape) for key in keys], ""


def clip_grad_norm(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
) -> float:
    """Clip gradients to a norm, in place; return the full model's norm before clipping.

    Args:
        parameters: parameters; those with `model_parallel` set are sharded, the others are
            replicated and count once.
        max_norm: largest norm.
        norm_type: p of the norm; infinity is the largest absolute value.

    Comm: one all-reduce of a scalar within the tensor-parallel group.
    """
    tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [(p.grad, getattr(p, "model_parallel", False)) for p in tensors if p.grad is not None]
    is_first, kind = get_model_parallel_rank() == 0, float(norm_type)
    counted = [grad for grad, is_part in grads if grad is not None and (is_part or is_first)]
    device = grads[0][0].device if grads and grads[0][0] is not None else None
    norms = torch.stack([g.detach().float().norm(kind) for g in counted] or [torch.zeros(())])
    if math.isinf(kind):
        total, op = norms.max().to(device), dist.ReduceOp.MAX
    else:
        total, op = norms.pow(kind).sum().to(device), dist.ReduceOp.SUM
    dist.all_reduce(total, op, group=get_model_parallel_group())
    norm = total.item() if math.isinf(kind) else total.item() ** (1 / kind)
    if max_norm / (norm + 1e-6) < 1:
        for grad, _ in grads:
            assert grad is not None
            grad.mul_(max_norm / (norm + 1e-6))
    return norm

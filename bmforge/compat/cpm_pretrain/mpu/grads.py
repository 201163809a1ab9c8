"""Gradient clipping for tensor-parallel models."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from bmforge.compat.cpm_pretrain.mpu.initialize import (
    get_model_parallel_group,
    get_model_parallel_rank,
)

__all__ = ["clip_grad_norm"]


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

"""Cross-entropy loss for logits that are sharded over the vocabulary."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from bmforge.compat.cpm_pretrain.mpu.initialize import get_model_parallel_group
from bmforge.errors import ShapeError
from bmforge.parallel.collectives import sum_forward

__all__ = ["vocab_parallel_cross_entropy"]


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
    group, width = get_model_parallel_group(), vocab_parallel_logits.shape[-1]
    top = vocab_parallel_logits.detach().amax(-1)
    dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    shifted = vocab_parallel_logits - top[..., None]
    index = target.long() - group.rank() * width
    is_here = (index >= 0) & (index < width)
    picked = shifted.gather(-1, index.where(is_here, 0)[..., None])[..., 0] * is_here
    mass, picked = sum_forward(torch.stack((shifted.exp().sum(-1), picked)), group).unbind()
    return mass.log() - picked

"""Collectives at the boundaries of tensor-parallel regions, under mpu's names."""

from __future__ import annotations

from torch import Tensor

from bmforge.compat.cpm_pretrain.mpu.initialize import get_model_parallel_group
from bmforge.parallel.collectives import gather_tokens, sum_backward, sum_forward, take_tokens

__all__ = [
    "copy_to_model_parallel_region",
    "gather_from_model_parallel_region",
    "reduce_from_model_parallel_region",
    "scatter_to_model_parallel_region",
]


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

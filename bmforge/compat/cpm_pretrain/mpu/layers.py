"""Tensor-parallel layers for programs that parallelize their models in their own code.

`weight` and `bias` are this process's part. The full weight is initialized everywhere and split, so
its values do not depend on the number of processes. `pretrain` parallelizes such a model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import LayerNorm

from bmforge.compat.cpm_pretrain.mpu.collectives import (
    VocabUtility,
    copy_to_model_parallel_region,
    divide,
    gather_from_model_parallel_region,
    reduce_from_model_parallel_region,
    scatter_to_model_parallel_region,
)
from bmforge.compat.cpm_pretrain.mpu.initialize import (
    get_model_parallel_rank,
    get_model_parallel_world_size,
    groups,
)

__all__ = [
    "ColumnParallelLinear", "LayerNorm", "PartParameter", "RowParallelLinear",
    "VocabParallelEmbedding",
]  # fmt: skip

Init = Callable[[Tensor], Any]


class PartParameter(nn.Parameter):
    """Parameter that is this process's shard of a full parameter, with Megatron's attributes.

    Args:
        data: this process's part.
        requires_grad: see torch.nn.Parameter.
        dim: sharded dim.
        stride: number of matrices stacked in the full tensor; the process has a part of each.
    """

    def __new__(
        cls, data: Tensor, requires_grad: bool = True, dim: int = 0, stride: int = 1
    ) -> PartParameter:
        """Create the instance and set `partition_dim` and `partition_stride`."""
        instance: PartParameter = super().__new__(cls, data, requires_grad)  # type: ignore[assignment]
        instance.partition_dim, instance.partition_stride = dim, stride
        return instance

    model_parallel = True
    partition_dim: int
    partition_stride: int

    def __deepcopy__(self, memo: dict[int, Any]) -> PartParameter:
        """Copy the values and the attributes of the parameter."""
        if id(self) not in memo:
            data = self.detach().clone()
            memo[id(self)] = PartParameter(
                data, self.requires_grad, self.partition_dim, self.partition_stride
            )
        return memo[id(self)]


def _draw_part(
    rows: int, columns: int, dim: int, init_method: Init, stride: int
) -> tuple[nn.Parameter, Tensor]:
    """Initialize a full matrix; return this process's part and the full matrix.

    Args:
        rows, columns: full size.
        dim: sharded dim.
        init_method: function that initializes a tensor in place.
        stride: number of matrices stacked in the full tensor; the process has a part of each.
    """
    full = torch.empty(rows, columns, device=groups.device)
    init_method(full)
    size, rank = get_model_parallel_world_size(), get_model_parallel_rank()
    pieces = full.split(divide(full.shape[dim], size * stride), dim)[rank::size]
    return PartParameter(torch.cat(pieces, dim).clone(), dim=dim, stride=stride), full


class _PartLinear(nn.Module):
    """Base class of the tensor-parallel linear layers, with `weight` and the sizes."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        dim: int,
        init_method: Init,
        stride: int,
        keep_master_weight_for_test: bool,
        skip_bias_add: bool,
    ) -> None:
        super().__init__()
        self.input_size, self.output_size = input_size, output_size
        self.skip_bias_add = skip_bias_add
        self.weight, full_weight = _draw_part(output_size, input_size, dim, init_method, stride)
        self.master_weight = full_weight if keep_master_weight_for_test else None
        self.bias: Any = None


class ColumnParallelLinear(_PartLinear):
    """Linear layer whose outputs are sharded.

    Args:
        input_size, output_size: sizes of the full layer.
        bias: True to add a bias, which begins at 0.
        gather_output: True to return all outputs instead of this process's outputs.
        init_method: function that initializes the full weight in place.
        stride: number of matrices stacked in the weight (3 for queries, keys and values).
        keep_master_weight_for_test: True to keep the full weight as `master_weight`.
        skip_bias_add: True to return the bias instead of adding it.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        init_method: Init = nn.init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
    ) -> None:
        keep = keep_master_weight_for_test
        super().__init__(input_size, output_size, 0, init_method, stride, keep, skip_bias_add)
        self.gather_output = gather_output
        part = divide(output_size, get_model_parallel_world_size())
        self.output_size_per_partition = part
        if bias:
            self.bias = PartParameter(torch.zeros(part, device=groups.device), stride=stride)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the outputs, and the bias if it was not added."""
        own = None if self.skip_bias_add else self.bias
        out = F.linear(copy_to_model_parallel_region(input_), self.weight, own)
        if self.gather_output:
            out = gather_from_model_parallel_region(out)
        return out, self.bias if self.skip_bias_add else None


class RowParallelLinear(_PartLinear):
    """Linear layer whose inputs are sharded.

    Args:
        input_size, output_size: sizes of the full layer.
        bias: True to add a bias, which begins at 0 and is replicated.
        input_is_parallel: True if the input has only this process's columns.
        init_method, stride, keep_master_weight_for_test, skip_bias_add: as in
            `ColumnParallelLinear`.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        init_method: Init = nn.init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
    ) -> None:
        keep = keep_master_weight_for_test
        super().__init__(input_size, output_size, 1, init_method, stride, keep, skip_bias_add)
        self.input_is_parallel = input_is_parallel
        self.input_size_per_partition = divide(input_size, get_model_parallel_world_size())
        if bias:
            self.bias = nn.Parameter(torch.zeros(output_size, device=groups.device))

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return all outputs, and the bias if it was not added."""
        own = input_ if self.input_is_parallel else scatter_to_model_parallel_region(input_)
        out = reduce_from_model_parallel_region(F.linear(own, self.weight))
        if self.skip_bias_add or self.bias is None:
            return out, self.bias
        return out + self.bias, None


class VocabParallelEmbedding(nn.Module):
    """Embedding whose vocabulary is sharded.

    Args:
        num_embeddings: size of the full vocabulary.
        embedding_dim: embedding size.
        init_method: function that initializes the full table in place.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, init_method: Init = nn.init.xavier_normal_
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.model_parallel_size = get_model_parallel_world_size()
        vocab_range = VocabUtility.vocab_range_from_global_vocab_size(
            num_embeddings, get_model_parallel_rank(), self.model_parallel_size
        )
        self.vocab_start_index, self.vocab_end_index = vocab_range
        self.num_embeddings_per_partition = vocab_range[1] - vocab_range[0]
        self.weight, _ = _draw_part(num_embeddings, embedding_dim, 0, init_method, 1)

    def forward(self, input_: Tensor) -> Tensor:
        """Return the embeddings of token ids.

        Shape:
            input_: (...) -> (..., D)
        """
        if self.model_parallel_size == 1:
            return F.embedding(input_, self.weight)
        is_here = (input_ >= self.vocab_start_index) & (input_ < self.vocab_end_index)
        rows = F.embedding((input_ - self.vocab_start_index) * is_here, self.weight)
        return reduce_from_model_parallel_region(rows * is_here[..., None])

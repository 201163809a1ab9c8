"""Replicated or tensor-parallel linear and embedding layers for hand-parallelized programs.

Between layers, a tensor's rows (dim 0) are sharded over the tensor-parallel processes unless an
option says otherwise. `bmforge.parallel.Layout(tp=...)` shards models without such layers.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bmforge.compat.bmtrain.module import DistributedModule
from bmforge.compat.bmtrain.parameter import DistributedParameter, ParameterInitializer
from bmforge.compat.bmtrain.runtime import config
from bmforge.errors import ConfigError
from bmforge.parallel.collectives import (
    gather_tokens,
    sum_backward,
    sum_forward,
    sum_scatter_tokens,
    take_tokens,
)

__all__ = [
    "ColumnParallelLinear", "Linear", "OpLinear", "OpParallelLinear", "Projection", "ReduceType",
    "RowParallelLinear", "VPEmbedding", "VPProjection",
]  # fmt: skip


class ReduceType(Enum):
    """Reduction of the partial outputs of a row-parallel product."""

    ALL_REDUCE = 1
    REDUCE_SCATTER = 2


class OpLinear:
    """`torch.nn.functional.linear` under BMTrain's name."""

    @staticmethod
    def apply(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``input @ weight.T + bias``."""
        return F.linear(input, weight, bias)


class OpParallelLinear:
    """Tensor-parallel matrix product with the collectives before and after it."""

    @staticmethod
    def apply(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        gather_input: bool = False,
        gather_output: bool = False,
        split_input: bool = False,
        reduce_output_type: ReduceType | int | None = None,
        async_gather_chunks: int = 2,
    ) -> Tensor:
        """Compute the tensor-parallel product.

        Args:
            input: this process's rows or columns of the input, or the full input (replicated).
            weight: this process's rows (outputs) or columns (inputs) of the weight.
            bias: bias of the outputs.
            gather_input: True to all-gather the rows of `input`.
            gather_output: True to all-gather the outputs of a column-parallel weight.
            split_input: True to use only this process's columns of a full `input`.
            reduce_output_type: reduction of the outputs of a row-parallel weight.
            async_gather_chunks: accepted and ignored (1 chunk).

        Comm: one collective per option that is set, and one in backward.
        """
        group = config["tp_comm"]
        if config["tp_size"] == 1:
            return F.linear(input, weight, bias)
        if gather_input:
            input = gather_tokens(input, group, 0, summed=not split_input)
        elif reduce_output_type is None:
            input = sum_backward(input, group)
        if split_input:
            input = take_tokens(input, group, -1)
        out = F.linear(input, weight, bias)
        if gather_output:
            out = gather_tokens(out, group, -1, summed=False)
        if reduce_output_type is None:
            return out
        if ReduceType(reduce_output_type) == ReduceType.ALL_REDUCE:
            return sum_forward(out, group)
        return sum_scatter_tokens(out, group, 0)


def _part(size: int, what: str) -> int:
    config.need("bmt.nn")
    parts = config["tp_size"]
    if size % parts:
        raise ConfigError(
            f"tp_size={parts} does not divide {what}={size}. Use a tp_size that divides {size}."
        )
    return size // parts


def _new(
    shape: tuple[int, ...], dtype: torch.dtype | None, tp_mode: bool = False, split_dim: int = -1
) -> Any:
    """Create a parameter: a matrix with Xavier-normal initialization, or a bias of zeros."""
    init: Any = torch.nn.init.xavier_normal_ if len(shape) > 1 else torch.nn.init.zeros_
    empty = torch.empty(shape, dtype=dtype)
    return DistributedParameter(empty, init_method=init, tp_mode=tp_mode, tp_split_dim=split_dim)


class _Linear(DistributedModule):
    """Base class of the linear layers; `weight` and `bias` may be this process's part."""

    def extra_repr(self) -> str:
        """Return the sizes of this process's part of the layer."""
        weight: Any = self._parameters["weight"]
        rows, columns = weight.shape
        has_bias = self._parameters.get("bias") is not None
        return f"in_features={columns}, out_features={rows}, bias={has_bias}"


class Linear(_Linear):
    """Linear layer with Xavier-normal weights and a bias of 0."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = _new((out_features, in_features), dtype)
        self.bias: Any = _new((out_features,), dtype) if bias else None

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input @ weight.T + bias``."""
        return F.linear(input, self.weight, self.bias)


class ColumnParallelLinear(_Linear):
    """Linear layer whose outputs are sharded over the tensor-parallel processes.

    Args:
        in_features, out_features, bias, dtype: sizes and options of the full layer.
        gather_output: True to return all outputs.
        gather_input: True if the input has this process's rows (default), False if it has all rows.
        async_gather_chunks: accepted and ignored (1 chunk).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        gather_output: bool = False,
        gather_input: bool = True,
        async_gather_chunks: int = 2,
    ) -> None:
        super().__init__()
        part = _part(out_features, "out_features")
        self.in_features, self.out_features = in_features, out_features
        self.out_features_per_partition = part
        self.gather_output, self.gather_input = gather_output, gather_input
        self.weight = _new((part, in_features), dtype, True, 0)
        self.bias: Any = _new((part,), dtype, True, 0) if bias else None

    def forward(self, input: Tensor) -> Tensor:
        """Return this process's outputs for all rows, or all outputs."""
        return OpParallelLinear.apply(
            input, self.weight, self.bias, self.gather_input, self.gather_output
        )


class RowParallelLinear(_Linear):
    """Linear layer whose inputs are sharded over the tensor-parallel processes.

    Args:
        in_features, out_features, bias, dtype: sizes and options of the full layer.
        split_input: True if the input has all columns of this process's rows, False if it has this
            process's columns of all rows.
        all_reduce_output: True to return all rows on every process instead of this process's rows.
        async_chunks: accepted and ignored (1 chunk).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        split_input: bool = False,
        all_reduce_output: bool = False,
        async_chunks: int = 2,
    ) -> None:
        super().__init__()
        part = _part(in_features, "in_features")
        self.in_features, self.out_features = in_features, out_features
        self.in_features_per_partition = part
        self.split_input, self.all_reduce_output = split_input, all_reduce_output
        self.weight = _new((out_features, part), dtype, True, 1)
        # Each process adds the bias to its own rows or, with all_reduce_output, to all rows.
        self.bias: Any = _new((out_features,), dtype, all_reduce_output) if bias else None

    def forward(self, input: Tensor) -> Tensor:
        """Return all outputs for this process's rows, or for all rows."""
        how = ReduceType.ALL_REDUCE if self.all_reduce_output else ReduceType.REDUCE_SCATTER
        out = OpParallelLinear.apply(
            input, self.weight, None, self.split_input, False, self.split_input, how
        )
        bias = self.bias
        return out if bias is None else out + bias


def _normal(table: Tensor, mean: float, std: float, **options: Any) -> Any:
    init = ParameterInitializer(torch.nn.init.normal_, mean=mean, std=std)
    return DistributedParameter(table, init_method=init, **options)


class VPEmbedding(DistributedModule):
    """Embedding whose vocabulary is sharded over the tensor-parallel processes.

    Args:
        vocab_size, embedding_size: sizes of the full table.
        dtype: dtype of the table.
        init_mean, init_std: parameters of the normal initialization.
    """

    def __init__(
        self,
        vocab_size: int,
        embedding_size: int,
        dtype: torch.dtype = torch.half,
        init_mean: float = 0.0,
        init_std: float = 1.0,
    ) -> None:
        super().__init__()
        part = _part(vocab_size, "vocab_size")
        self.dim_model, self.vocab_size_per_partition = embedding_size, part
        self.start_index = config["tp_rank"] * part
        self.end_index = self.start_index + part
        table = torch.empty(part, embedding_size, dtype=dtype)
        self.weight = _normal(table, init_mean, init_std, tp_mode=True, tp_split_dim=0)

    def forward(self, x: Tensor, projection: bool = False) -> Tensor:
        """Look up token embeddings or, with `projection`, compute the local part of the logits.

        Args:
            x: this process's token ids; with `projection`, its hidden states.
            projection: True to return logits for the tokens of all tensor-parallel processes.
        """
        if projection:
            return OpParallelLinear.apply(x, self.weight, None, gather_input=True)
        weight = self.weight
        if config["tp_size"] > 1:
            weight = gather_tokens(weight, config["tp_comm"], 0, summed=True)
        return F.embedding(x, weight)


class Projection(DistributedModule):
    """Language-model head without bias; initialization and arguments are those of `VPEmbedding`."""

    def __init__(
        self,
        vocab_size: int,
        embedding_size: int,
        dtype: torch.dtype = torch.half,
        init_mean: float = 0.0,
        init_std: float = 1.0,
    ) -> None:
        super().__init__()
        table = torch.empty(vocab_size, embedding_size, dtype=dtype)
        self.weight = _normal(table, init_mean, init_std)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits over the whole vocabulary."""
        return F.linear(x, self.weight)


class VPProjection(VPEmbedding):
    """Language-model head that returns the logits of this process's part of the vocabulary."""

    def forward(self, x: Tensor, projection: bool = True) -> Tensor:
        """Return the local logits for hidden states that are replicated over the group."""
        return OpParallelLinear.apply(x, self.weight)

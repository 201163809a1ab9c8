"""Layers, whole and cut over tensor-parallel processes, for programs that place them by hand.

Between them, a tensor's rows (dim 0) are divided over the processes, unless an option says whole.
`bmforge.parallel.Layout(tp=...)` cuts models without such layers.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bmforge.compat.bmtrain.module import DistributedModule
from bmforge.compat.bmtrain.names import NAMES
from bmforge.compat.bmtrain.parameter import DistributedParameter, ParameterInitializer
from bmforge.compat.bmtrain.runtime import config
from bmforge.compat.names import missing_names
from bmforge.errors import ConfigError
from bmforge.parallel.collectives import (
    gather_tokens,
    sum_backward,
    sum_forward,
    sum_scatter_tokens,
    take_tokens,
)

__all__ = [
    "ColumnParallelLinear",
    "Linear",
    "OpLinear",
    "OpParallelLinear",
    "Projection",
    "ReduceType",
    "RowParallelLinear",
    "VPEmbedding",
    "VPProjection",
]


class ReduceType(Enum):
    """How the parts of an output become one."""

    ALL_REDUCE = 1
    REDUCE_SCATTER = 2


class OpLinear:
    """F.linear under its old name."""

    @staticmethod
    def apply(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``input @ weight.T + bias``."""
        return F.linear(input, weight, bias)


class OpParallelLinear:
    """A product with this process's part of a matrix, with what has to happen before and after."""

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
        """Return the product.

        Args:
            input: this process's rows, all rows (the same on each), or this process's columns.
            weight: this process's rows (outputs), or its columns (inputs).
            bias: belongs to the outputs.
            gather_input: `input` has this process's rows; gather all.
            gather_output: the weight has a part of the outputs; gather all.
            split_input: the weight has a part of the inputs; take them from whole ones.
            reduce_output_type: how outputs of parts of the inputs are summed.
            async_gather_chunks: taken as 1.

        Comm: one collective per step that is named, and its counterpart in backward.
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
        raise ConfigError(f"tp_size={parts} does not divide {what}={size}.")
    return size // parts


class Linear(DistributedModule):
    """A linear layer, xavier-normal; the bias begins at 0."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        weight = torch.empty(out_features, in_features, dtype=dtype)
        self.weight = DistributedParameter(weight, init_method=torch.nn.init.xavier_normal_)
        self.bias: Any = None
        if bias:
            values = torch.empty(out_features, dtype=dtype)
            self.bias = DistributedParameter(values, init_method=torch.nn.init.zeros_)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input @ weight.T + bias``."""
        return F.linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Describe the layer."""
        has_bias = self._parameters.get("bias") is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={has_bias}"


class ColumnParallelLinear(DistributedModule):
    """A linear layer of which each process has a part of the outputs.

    Args:
        in_features, out_features, bias, dtype: of the whole layer.
        gather_output: return all outputs.
        gather_input: the input has this process's rows; False: all rows.
        async_gather_chunks: taken as 1.
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
        weight = torch.empty(part, in_features, dtype=dtype)
        init = torch.nn.init.xavier_normal_
        self.weight = DistributedParameter(weight, init_method=init, tp_mode=True, tp_split_dim=0)
        self.bias: Any = None
        if bias:
            values, zeros = torch.empty(part, dtype=dtype), torch.nn.init.zeros_
            self.bias = DistributedParameter(
                values, init_method=zeros, tp_mode=True, tp_split_dim=0
            )

    def forward(self, input: Tensor) -> Tensor:
        """Return this process's outputs of all rows, or all outputs."""
        return OpParallelLinear.apply(
            input, self.weight, self.bias, self.gather_input, self.gather_output
        )

    def extra_repr(self) -> str:
        """Describe the layer."""
        return f"in_features={self.in_features}, out_features={self.out_features_per_partition}"


class RowParallelLinear(DistributedModule):
    """A linear layer of which each process has a part of the inputs.

    Args:
        in_features, out_features, bias, dtype: of the whole layer.
        split_input: the input has all columns of this process's rows; False: this process's columns
            of all rows.
        all_reduce_output: return all rows, on every process; False: this process's rows.
        async_chunks: taken as 1.
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
        weight = torch.empty(out_features, part, dtype=dtype)
        init = torch.nn.init.xavier_normal_
        self.weight = DistributedParameter(weight, init_method=init, tp_mode=True, tp_split_dim=1)
        self.bias: Any = None
        if bias:
            # Each process adds it to its rows; where all have all rows, to the same ones.
            values, zeros = torch.empty(out_features, dtype=dtype), torch.nn.init.zeros_
            self.bias = DistributedParameter(values, init_method=zeros, tp_mode=all_reduce_output)

    def forward(self, input: Tensor) -> Tensor:
        """Return all outputs of this process's rows, or of all."""
        how = ReduceType.ALL_REDUCE if self.all_reduce_output else ReduceType.REDUCE_SCATTER
        out = OpParallelLinear.apply(
            input, self.weight, None, self.split_input, False, self.split_input, how
        )
        bias = self.bias
        return out if bias is None else out + bias

    def extra_repr(self) -> str:
        """Describe the layer."""
        return f"in_features={self.in_features_per_partition}, out_features={self.out_features}"


class VPEmbedding(DistributedModule):
    """A table of which each process has a part of the vocabulary.

    Args:
        vocab_size, embedding_size: of the whole table.
        dtype: of the table.
        init_mean, init_std: of its normal distribution.
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
        init = ParameterInitializer(torch.nn.init.normal_, mean=init_mean, std=init_std)
        table = torch.empty(part, embedding_size, dtype=dtype)
        self.weight = DistributedParameter(table, init_method=init, tp_mode=True, tp_split_dim=0)

    def forward(self, x: Tensor, projection: bool = False) -> Tensor:
        """Look tokens up or, with `projection`, score this process's part of the vocabulary.

        Args:
            x: this process's tokens; with `projection`, its hidden states.
            projection: return scores, for the tokens of all tensor-parallel processes.
        """
        if projection:
            return OpParallelLinear.apply(x, self.weight, None, gather_input=True)
        weight = self.weight
        if config["tp_size"] > 1:
            weight = gather_tokens(weight, config["tp_comm"], 0, summed=True)
        return F.embedding(x, weight)


class Projection(DistributedModule):
    """A head without a bias, normal; see `VPEmbedding` for the arguments."""

    def __init__(
        self,
        vocab_size: int,
        embedding_size: int,
        dtype: torch.dtype = torch.half,
        init_mean: float = 0.0,
        init_std: float = 1.0,
    ) -> None:
        super().__init__()
        init = ParameterInitializer(torch.nn.init.normal_, mean=init_mean, std=init_std)
        weight = torch.empty(vocab_size, embedding_size, dtype=dtype)
        self.weight = DistributedParameter(weight, init_method=init)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores for the whole vocabulary."""
        return F.linear(x, self.weight)


class VPProjection(VPEmbedding):
    """The head alone: scores of this process's part of the vocabulary, for its own input."""

    def forward(self, x: Tensor, projection: bool = True) -> Tensor:
        """Return scores of hidden states that are the same on all tensor-parallel processes."""
        return OpParallelLinear.apply(x, self.weight)


__getattr__ = missing_names("bmtrain", NAMES, __all__, "nn")

"""Reads weights of linear layers as dense tensors, also if bmforge or torchao quantized them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bmforge.shards import is_torchao, local_tensor, whole_tensor

__all__ = ["has_weight", "is_conv1d", "local_weight", "whole_weight"]


def has_weight(module: Any) -> bool:
    """Return True if a linear layer has a weight, quantized or not."""
    return getattr(module, "weight", None) is not None or hasattr(type(module), "dense")


def is_conv1d(module: Any) -> bool:
    """Return True for transformers' Conv1D, a linear layer whose weight is (in, out)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def local_weight(module: Any, dtype: torch.dtype) -> Tensor:
    """Return the local shard of a linear layer's weight, (out, in), dequantized to `dtype`."""
    if hasattr(type(module), "dense"):  # of the class: an adapter may have the name "dense"
        dense: Tensor = module.dense(dtype)
        return dense
    weight = local_tensor(module.weight)
    # torch.compile cannot trace `is_torchao`, but compares the type with torch's own.
    if type(weight) not in (Tensor, nn.Parameter) and is_torchao(weight):
        weight = weight.dequantize()
    weight = weight.to(dtype)
    return weight if hasattr(module, "out_features") else weight.t()  # transformers' Conv1D


def whole_weight(module: nn.Module, dtype: torch.dtype) -> Tensor:
    """Return the whole weight of a linear layer, (out, in), dequantized to `dtype`.

    Comm: an all-gather of each sharded parameter of the layer.
    """
    tensors = {f"layer.{n}": whole_tensor(p) for n, p in module.named_parameters(recurse=False)}
    weight: Tensor = functional_call(_Weight(module), tensors, (dtype,))
    return weight


class _Weight(nn.Module):
    """Module whose output is the weight of a layer, so that `functional_call` can read it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, dtype: torch.dtype) -> Tensor:
        """Return the weight in `dtype`."""
        return local_weight(self.layer, dtype)

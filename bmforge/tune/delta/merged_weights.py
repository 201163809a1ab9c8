"""Reads weights for merging in full precision, and writes the results to local shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.shards import is_torchao, local_box, local_tensor, whole_tensor

__all__ = [
    "dequantized_weight",
    "full_precision",
    "get_parameter",
    "last_projection",
    "write_local_",
]


def get_parameter(model: nn.Module, target: str, key: str) -> Tensor:
    """Return the parameter `key` of the module `target`."""
    return getattr(model.get_submodule(target), key)  # type: ignore[no-any-return]


@torch.no_grad()
def write_local_(tensor: Tensor, value: Tensor) -> None:
    """Copy a value, full or already sharded, into this rank's shard of a tensor."""
    box = local_box(tensor)
    local = local_tensor(tensor.detach())
    local.copy_(value[box.slices] if value.shape != local.shape else value)


def full_precision(tensor: Tensor) -> Tensor:
    """Return the unsharded tensor in fp32 or wider, so that merging rounds only once."""
    full = whole_tensor(tensor.detach())
    return full if full.dtype == torch.float64 else full.float()


def last_projection(module: nn.Module) -> str | None:
    """Return the name of the last projection of an attention or MLP; None for other modules."""
    for last in ("o_proj", "down_proj"):
        if isinstance(getattr(module, last, None), nn.Module):
            return last
    return None


def dequantized_weight(model: nn.Module, target: str, allowed: bool) -> Tensor | None:
    """Return the dequantized weight of a layer quantized by torchao; None if it is not quantized.

    Raises:
        ConfigError: the weight is quantized by another library, or dequantizing is not allowed.
    """
    module: Any = model.get_submodule(target)
    weight = getattr(module, "weight", None)
    if hasattr(module, "packed") or (isinstance(weight, Tensor) and not weight.is_floating_point()):
        raise ConfigError(
            f"{target} has an integer weight, into which an adapter cannot be merged. Load the "
            "model unquantized, merge, and quantize it afterwards."
        )
    if weight is None or type(weight) in (nn.Parameter, Tensor) or not is_torchao(weight):
        return None
    if not allowed:
        raise ConfigError(
            f"{target} has a quantized weight ({type(weight).__name__}). Pass "
            "merge(dequantize=True) to replace it with an unquantized one."
        )
    return weight.dequantize().detach()  # type: ignore[no-any-return]

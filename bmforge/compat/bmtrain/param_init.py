"""Parameter initialization, and operations on all parameters of a model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bmforge.compat.bmtrain.module import claim_blocks_, reshard_blocks_
from bmforge.compat.bmtrain.parameter import full_shape, origin_of, set_values_
from bmforge.compat.bmtrain.runtime import config

__all__ = ["grouped_parameters", "init_parameters", "sum_plain_gradients_"]


@torch.no_grad()
def init_parameters(model: nn.Module) -> None:
    """Run every parameter's `init_method` on the full parameter, in module order.

    Random numbers come from torch's global generator, so the weights are bit-identical to those of
    torch, with any number of processes.

    Memory: one full parameter at a time.
    """
    config.need("init_parameters")
    claim_blocks_(model)
    reshard_blocks_(model)
    for param in model.parameters():
        origin = origin_of(param)
        if origin is not None and origin.init_method is not None:
            value = torch.empty(full_shape(param), dtype=param.dtype, device=config.device)
            origin.init_method(value)
            set_values_(param, value)
    sum_plain_gradients_(model)


def sum_plain_gradients_(model: nn.Module) -> None:
    """Sum the gradients of undistributed parameters over the processes: all replicas stay equal."""
    if config["world_size"] == 1:
        return
    for param in model.parameters():
        if origin_of(param) is None and param.is_leaf and not hasattr(param, "is_summed"):
            param.is_summed = True  # type: ignore[attr-defined]
            if param.requires_grad:
                param.register_hook(_sum_over_all)


def _sum_over_all(grad: Tensor) -> Tensor:
    total = grad.clone()
    dist.all_reduce(total, group=config["comm"])
    return total


def grouped_parameters(model: nn.Module) -> Iterator[tuple[str | None, list[nn.Parameter]]]:
    """Yield (name, parameters) of every parameter group."""
    groups: dict[str | None, list[nn.Parameter]] = {}
    reshard_blocks_(model)
    for param in model.parameters():
        origin = origin_of(param)
        groups.setdefault(None if origin is None else origin.group, []).append(param)
    yield from groups.items()

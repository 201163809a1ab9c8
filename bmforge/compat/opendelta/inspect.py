"""OpenDelta's module `utils.inspect`, which counts trainable parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from bmforge.logging import get_logger

__all__ = ["inspect_module_statistics", "inspect_optimizer_statistics"]


def _count(parameters: Iterable[torch.Tensor]) -> tuple[int, int]:
    """Return the number of parameter elements, and how many of them are trainable."""
    listed = list(parameters)
    return sum(p.numel() for p in listed), sum(p.numel() for p in listed if p.requires_grad)


def inspect_module_statistics(module: nn.Module, verbose: bool = True) -> dict[str, Any]:
    """Return and log the number of trainable parameters of a module."""
    total, trained = _count(module.parameters())
    statistics = {
        "total_parameters": total,
        "trainable_parameters": trained,
        "trainable_ratio": trained / max(total, 1),
    }
    if verbose:
        get_logger().info("%s", statistics)
    return statistics


def inspect_optimizer_statistics(
    optimizer: torch.optim.Optimizer, verbose: bool = True
) -> dict[str, Any]:
    """Return and log the options of each parameter group and its number of parameters."""
    statistics: dict[str, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        total, trained = _count(group["params"])
        statistics[f"param_group_{number}"] = {
            "total_parameters": total,
            "trainable_parameters": trained,
            **{name: value for name, value in group.items() if name != "params"},
        }
    statistics["total_parameters"] = sum(
        group_statistics["total_parameters"] for group_statistics in statistics.values()
    )
    if verbose:
        get_logger().info("%s", statistics)
    return statistics

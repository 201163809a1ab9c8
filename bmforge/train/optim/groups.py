"""Splits parameters into groups by weight decay, name and mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from bmforge.errors import ConfigError
from bmforge.surgery import match_glob, match_names

__all__ = ["Group", "Named", "OptimGroup", "by_mesh", "check_globs", "make_groups", "param_groups"]

Group = dict[str, Any]
Named = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class OptimGroup:
    """Parameters with separate optimizer settings, which default to those of `OptimConfig`.

    Args:
        glob: name glob of the parameters, see `surgery`; the first matching group applies.
        lr: peak learning rate of the group.
        weight_decay: weight decay of the group's parameters, except vectors and biases.
    """

    glob: str
    lr: float | None = None
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        """Raise `ConfigError` for values out of range, or for a group without settings."""
        for field in ("lr", "weight_decay"):
            value = getattr(self, field)
            if value is not None and not (value >= 0.0 and math.isfinite(value)):
                raise ConfigError(
                    f"optim.groups: {field}={value} of {self.glob!r} must be finite and at least 0."
                )
        if self.lr is None and self.weight_decay is None:
            raise ConfigError(
                f"optim.groups: the group {self.glob!r} has no effect without settings. Set its "
                "lr or its weight_decay."
            )


def param_groups(model: nn.Module, weight_decay: float) -> list[Group]:
    """Return the trainable parameters in one group with weight decay and one without.

    Vectors, scalars and biases have no weight decay. A tied parameter is listed once, under its
    first name. ``params`` contains (name, parameter) pairs, which torch's optimizers split into
    ``params`` and ``param_names``. Empty groups are omitted.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return _decay_groups(named, weight_decay)


def make_groups(
    named: Named, lr: float, weight_decay: float, own: Sequence[OptimGroup]
) -> list[Group]:
    """Build parameter groups; ``base_lr`` of each group is its peak learning rate.

    Args:
        named: pairs (name, parameter) of the trained parameters.
        lr: peak learning rate of parameters that no group of `own` selects.
        weight_decay: weight decay of parameters that no group of `own` selects.
        own: groups with separate settings.
    """
    parts: dict[OptimGroup | None, Named] = {None: []} | {group: [] for group in own}
    for name, parameter in named:
        fit = next((group for group in own if match_glob(name, group.glob)), None)
        parts[fit].append((name, parameter))
    groups = []
    for group, part in parts.items():
        rate = lr if group is None or group.lr is None else group.lr
        has_own = group is not None and group.weight_decay is not None
        decay = group.weight_decay if group is not None and has_own else weight_decay
        assert decay is not None
        groups += [
            {**group_part, "lr": rate, "base_lr": rate} for group_part in _decay_groups(part, decay)
        ]
    return groups


def check_globs(model: nn.Module, own: Sequence[OptimGroup]) -> None:
    """Raise `ConfigError` for a group whose glob matches no parameter, on any pipeline stage."""
    find_whole = getattr(model, "whole", None)
    full_model = find_whole() if callable(find_whole) else model
    names = [name for name, _ in full_model.named_parameters()]
    match_names(names, [group.glob for group in own], "optim.groups: parameter")


def _decay_groups(named: Named, weight_decay: float) -> list[Group]:
    """Split (name, parameter) pairs into a group with and a group without weight decay."""
    plain = {name for name, p in named if p.dim() <= 1 or name.endswith(("_bias", ".bias"))}
    groups: list[Group] = [
        {"params": [(n, p) for n, p in named if n not in plain], "weight_decay": weight_decay},
        {"params": [(n, p) for n, p in named if n in plain], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def by_mesh(groups: list[Group]) -> list[Group]:
    """Split groups by mesh: a new group has unsharded parameters, or those sharded on one mesh.

    torch's fused kernel raises an error for a group that mixes them.
    """
    split: list[Group] = []
    for group in groups:
        parts: dict[Any, Named] = {}
        for name, p in group["params"]:
            mesh = p.device_mesh if isinstance(p, DTensor) else None
            parts.setdefault(mesh, []).append((name, p))
        split += [{**group, "params": part} for part in parts.values()]
    return split

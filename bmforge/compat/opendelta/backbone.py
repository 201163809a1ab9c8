"""What a delta model asks of its backbone: where it may stand, what is trained, what is saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bmforge.errors import ConfigError
from bmforge.logging import get_logger
from bmforge.models import Model
from bmforge.tune.delta.address import find_wholes

__all__ = [
    "drop_hooks_",
    "find_trained",
    "is_delta",
    "keep_trained",
    "read_card",
    "take_parts_",
    "zoo_in",
]


def take_parts_(backbone: nn.Module) -> None:
    """Let a backbone that BMTrain's names have shared out take parts, which are then as well."""
    if any(isinstance(parameter, DTensor) for parameter in backbone.parameters()):
        backbone.__dict__["takes_parts"] = True


def zoo_in(backbone: nn.Module) -> nn.Module:
    """Return the one model of the zoo in a backbone, or the backbone."""
    found = [module for module in backbone.modules() if isinstance(module, Model)]
    return found[0] if len(found) == 1 else backbone


def is_delta(root: nn.Module, name: str) -> bool:
    """Tell whether a parameter is a delta's."""
    module = root
    for part in name.split(".")[:-1]:
        module = getattr(module, part)
        if getattr(module, "is_delta", False):
            return True
    return False


def find_trained(root: nn.Module, targets: Sequence[str]) -> tuple[set[str], list[str]]:
    """Return the names of the parameters that targets mean, and the targets that mean some."""
    found: set[str] = set()
    meant = []
    for target in targets:
        try:
            found |= find_wholes(root, [target]).keys()
        except ConfigError as error:
            get_logger().warning("nothing is left unfrozen by %r: %s", target, error)
        else:
            meant.append(target)
    return found, meant


def keep_trained(
    module: nn.Module, state_dict: dict[str, Tensor], prefix: str, local_metadata: Any
) -> None:
    """The hook behind `state_dict`: leave out what has no gradient."""
    trained = {prefix + name for name, p in module.named_parameters() if p.requires_grad}
    for name in [n for n in state_dict if n.startswith(prefix) and n not in trained]:
        del state_dict[name]


def drop_hooks_(module: nn.Module) -> None:
    """Let a `state_dict` have everything again."""
    hooks = module._state_dict_hooks
    for key in [key for key, hook in hooks.items() if hook is keep_trained]:
        del hooks[key]


def read_card(center_args: Any) -> dict[str, Any]:
    """Return what a delta's card says, of what programs told DeltaCenter."""
    told = center_args if isinstance(center_args, Mapping) else vars(center_args or _Nothing())
    tasks = told.get("train_tasks")
    score = told.get("test_performance")
    found = {
        "data": ", ".join(tasks) if isinstance(tasks, list | tuple) else tasks,
        "license": told.get("license"),
        "scores": None if score is None else {str(told.get("test_metrics") or "score"): score},
        "base": told.get("backbone_model"),
    }
    return {name: value for name, value in found.items() if value}


class _Nothing:
    """Has no attributes."""

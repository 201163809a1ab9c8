"""Helpers for a delta model's backbone: trained parameters, state-dict hooks, model cards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bmforge.errors import ConfigError
from bmforge.logging import get_logger
from bmforge.models import Model
from bmforge.tune.delta.address import find_wholes
from bmforge.tune.delta.opendelta_format import rename_inner

__all__ = [
    "drop_hooks_",
    "find_trained",
    "is_delta",
    "keep_trained",
    "read_card",
    "rename_loaded_",
    "take_parts_",
    "zoo_in",
]


def take_parts_(backbone: nn.Module) -> None:
    """Allow adapters in a backbone that BMTrain's API has sharded; the adapters are sharded too."""
    if any(isinstance(parameter, DTensor) for parameter in backbone.parameters()):
        backbone.__dict__["takes_parts"] = True


def zoo_in(backbone: nn.Module) -> nn.Module:
    """Return the only bmforge model inside a backbone; the backbone if there is none or several."""
    models = [module for module in backbone.modules() if isinstance(module, Model)]
    return models[0] if len(models) == 1 else backbone


def is_delta(root: nn.Module, name: str) -> bool:
    """Return True if a parameter belongs to an adapter."""
    module = root
    for part in name.split(".")[:-1]:
        module = getattr(module, part)
        if getattr(module, "is_delta", False):
            return True
    return False


def find_trained(root: nn.Module, targets: Sequence[str]) -> tuple[set[str], list[str]]:
    """Return the names of parameters that match targets, and the targets that match any."""
    names: set[str] = set()
    meant = []
    for target in targets:
        try:
            names |= find_wholes(root, [target]).keys()
        except ConfigError as error:
            get_logger().warning("no module remains unfrozen by %r: %s", target, error)
        else:
            meant.append(target)
    return names, meant


def keep_trained(
    module: nn.Module, state_dict: dict[str, Tensor], prefix: str, local_metadata: Any
) -> None:
    """State-dict hook that removes frozen parameters."""
    trained = {prefix + name for name, p in module.named_parameters() if p.requires_grad}
    for name in [n for n in state_dict if n.startswith(prefix) and n not in trained]:
        del state_dict[name]


def rename_loaded_(
    module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *arguments: Any
) -> None:
    """Hook of `load_state_dict` that renames the tensors of deltas that OpenDelta saved."""
    shapes = {prefix + name: p.shape for name, p in module.named_parameters()}
    for name in [n for n in state_dict if n.startswith(prefix) and n not in shapes]:
        own_name = rename_inner(name)
        if shapes.get(own_name) == state_dict[name].shape:
            state_dict[own_name] = state_dict.pop(name)


def drop_hooks_(module: nn.Module) -> None:
    """Restore the complete `state_dict` of a module by removing the hook."""
    hooks = module._state_dict_hooks
    for key in [key for key, hook in hooks.items() if hook is keep_trained]:
        del hooks[key]


def read_card(center_args: Any) -> dict[str, Any]:
    """Convert DeltaCenter's arguments to fields of the model card."""
    fields = center_args if isinstance(center_args, Mapping) else vars(center_args or _Nothing())
    tasks = fields.get("train_tasks")
    score = fields.get("test_performance")
    card = {
        "data": ", ".join(tasks) if isinstance(tasks, list | tuple) else tasks,
        "license": fields.get("license"),
        "scores": None if score is None else {str(fields.get("test_metrics") or "score"): score},
        "base": fields.get("backbone_model"),
    }
    return {name: value for name, value in card.items() if value}


class _Nothing:
    """Object without attributes."""

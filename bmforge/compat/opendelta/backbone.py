"""Helpers for a delta model's backbone: trained parameters, state-dict hooks, model cards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bmforge.compat.bmtrain.parameter import full_shape
from bmforge.compat.bmtrain.store import published_parameters
from bmforge.errors import ConfigError
from bmforge.logging import get_logger
from bmforge.models import Model
from bmforge.shards import whole_tensor
from bmforge.tune.delta import list_deltas
from bmforge.tune.delta.address import find_places, find_target_parameters
from bmforge.tune.delta.attached import has_deltas
from bmforge.tune.delta.base import AttachedDelta
from bmforge.tune.delta.opendelta_format import old_type_of
from bmforge.tune.delta.opendelta_names import old_inner_name

__all__ = [
    "drop_hooks_", "existing_targets", "find_trained", "is_delta", "keep_trained", "old_tensors",
    "read_card", "rename_loaded_", "rename_saved_", "take_parts_", "zoo_in",
]  # fmt: skip


def take_parts_(backbone: nn.Module) -> None:
    """Allow adapters in a backbone that BMTrain's API has sharded; the adapters are sharded too."""
    if any(isinstance(parameter, DTensor) for parameter in backbone.parameters()):
        backbone.__dict__["takes_parts"] = True


def zoo_in(backbone: nn.Module) -> nn.Module:
    """Return the only bmforge model in a backbone; if there is none or several, the backbone."""
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
    """Return the names of parameters that match a target, and the targets that have a match."""
    names: set[str] = set()
    meant = []
    for target in targets:
        try:
            names |= find_target_parameters(root, [target]).keys()
        except ConfigError as error:
            get_logger().warning("the target %r unfreezes no module: %s", target, error)
        else:
            meant.append(target)
    return names, meant


def existing_targets(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """Return the targets that match a module, or all targets if no target matches a module."""
    missing: dict[str, str] = {}
    for target in targets:
        try:
            find_places(model, [target])
        except ConfigError as error:
            missing[target] = str(error)
    if len(missing) == len(targets):
        return list(targets)
    for target, why in missing.items():
        get_logger().warning(
            "the target %r of modified_modules is ignored, because %s", target, why
        )
    return [target for target in targets if target not in missing]


def saved_names(backbone: nn.Module) -> dict[str, str]:
    """Return a dict from a backbone's tensor names to those in OpenDelta's files.

    For ModelCenter's models, the file has ModelCenter's names. Tensors that OpenDelta does not have
    are left out.
    """
    names = published_parameters(backbone)
    for before, delta in _deltas_in(backbone):
        kind = old_type_of(type(delta)) or ""
        for owner, slot, part in delta.held:
            for key, _ in part.named_parameters():
                own_name = f"{before}{owner}.{slot}.{key}"
                owner_name = names.pop(own_name, own_name).removesuffix(f"{slot}.{key}")
                if kind == "bitfit" and _is_old_bias(delta.model.get_submodule(owner)):
                    names[own_name] = f"{owner_name}bias"
                elif inner := old_inner_name(kind, key):
                    names[own_name] = (before if kind == "soft_prompt" else owner_name) + inner
    return names


def _deltas_in(backbone: nn.Module) -> Iterator[tuple[str, AttachedDelta]]:
    """Yield (name prefix of the submodel, delta) for each delta in a backbone."""
    for prefix, module in backbone.named_modules():
        if has_deltas(module):
            yield from ((f"{prefix}." if prefix else "", d) for d in list_deltas(module).values())


def _is_old_bias(module: nn.Module) -> bool:
    """Return True if OpenDelta's BitFit trains the module's own bias, or adds one."""
    return "bias" in module._parameters or isinstance(module, nn.Linear | nn.LayerNorm)


def old_tensors(backbone: nn.Module, delta: AttachedDelta) -> dict[str, Tensor]:
    """Return a delta's tensors, and the base tensors that it trains, under OpenDelta's names.

    The tensors are unsharded and on the host. The dict is empty if OpenDelta cannot represent the
    delta, for example if it adds a bias to whole blocks.

    Comm: all processes must call it.
    """
    names, tensors = saved_names(backbone), {}
    before = next(before for before, d in _deltas_in(backbone) if d is delta)
    for name, parameter in delta.tensors().items():
        own_name = before + name
        if own_name not in names and name not in delta.fully_trained_parameters():
            return {}
        old_name, value = names.get(own_name, own_name), _on_host(parameter)
        tensors[old_name] = _old_value(backbone, own_name, old_name, value).contiguous()
    return tensors


def _old_value(backbone: nn.Module, own_name: str, old_name: str, value: Tensor) -> Tensor:
    """Convert a tensor to OpenDelta's format: prefix heads concatenated, base bias added.

    Args:
        own_name: name of the tensor in bmforge.
        old_name: name of the tensor in OpenDelta's files.
    """
    if old_name.endswith(("prefix.past_key", "prefix.past_value")) and value.dim() == 3:
        return value.transpose(0, 1).flatten(1)
    bias = _own_bias(backbone, own_name, old_name)
    return value if bias is None else value + bias.to(value.device)


def _own_value(backbone: nn.Module, own_name: str, old_name: str, value: Tensor) -> Tensor:
    """Convert a tensor from OpenDelta's format; the inverse of `_old_value`."""
    shape = backbone.get_parameter(own_name).shape
    if old_name.endswith(("prefix.past_key", "prefix.past_value")) and value.dim() < len(shape):
        return value.unflatten(1, (shape[0], -1)).transpose(0, 1)
    bias = _own_bias(backbone, own_name, old_name)
    return value if bias is None or bias.shape != value.shape else value - bias.to(value.device)


def _own_bias(backbone: nn.Module, own_name: str, old_name: str) -> Tensor | None:
    """Return the base bias that OpenDelta includes in a BitFit bias; None if there is none."""
    if not own_name.endswith(".bias") or not old_name.endswith(".bias"):
        return None
    owner = backbone.get_submodule(own_name.rpartition(".")[0].rpartition(".")[0])
    bias = owner._parameters.get("bias")
    return None if bias is None else _on_host(bias)


def _on_host(parameter: Tensor) -> Tensor:
    return whole_tensor(parameter).detach().cpu()


def rename_saved_(
    backbone: nn.Module, state_dict: dict[str, Tensor], prefix: str, *arguments: Any
) -> None:
    """State-dict hook that renames the tensors of deltas to OpenDelta's names."""
    # The hooks of ModelCenter's models have already renamed their modules.
    published = published_parameters(backbone)
    for own, old in saved_names(backbone).items():
        name = prefix + published.get(own, own)
        if name in state_dict and name != prefix + old:
            state_dict[prefix + old] = _old_value(backbone, own, old, state_dict.pop(name))


def rename_loaded_(
    backbone: nn.Module, state_dict: dict[str, Tensor], prefix: str, *arguments: Any
) -> None:
    """Hook of `load_state_dict` that accepts the tensors of deltas under OpenDelta's names."""
    for own, old in saved_names(backbone).items():
        if prefix + old in state_dict and prefix + own not in state_dict:
            value = _own_value(backbone, own, old, state_dict[prefix + old])
            if full_shape(backbone.get_parameter(own)) == value.shape:
                del state_dict[prefix + old]
                state_dict[prefix + own] = value


def keep_trained(
    module: nn.Module, state_dict: dict[str, Tensor], prefix: str, local_metadata: Any
) -> None:
    """State-dict hook that removes frozen parameters."""
    names = saved_names(module)
    trained = {n: names.get(n, n) for n, p in module.named_parameters() if p.requires_grad}
    trained_names = {prefix + name for pair in trained.items() for name in pair}
    for name in [n for n in state_dict if n.startswith(prefix) and n not in trained_names]:
        del state_dict[name]


def drop_hooks_(module: nn.Module) -> None:
    """Restore the complete `state_dict` of a module by removing the hook `keep_trained`."""
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
    """Default object without attributes, used if `center_args` is None."""

"""Random initialization of models, with the same values on every layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bmforge.nn.part import Derived, tensor_notes
from bmforge.nn.random_init import copy_part_, fill_, init_from_note_, sample_normal_
from bmforge.shards import is_distributed, is_streamed
from bmforge.surgery import persistent_tensors

__all__ = [
    "SkipInit",
    "init_tensor_",
    "init_weights_",
    "materialize_",
    "weight_initializer",
]


class SkipInit(TorchFunctionMode):
    """Mode in which modules are built without initializing their weights.

    On the meta device, initialization has no effect, but it makes torch import its compiler, which
    takes seconds.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Skip the functions of `torch.nn.init` and return their tensor unchanged."""
        if getattr(func, "__module__", None) == nn.init.__name__:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def materialize_(
    model: nn.Module,
    device: torch.device | str | None = None,
    elsewhere: Mapping[str, torch.device] | None = None,
) -> None:
    """Allocate the meta tensors of a model; ties, sharding and allocated tensors are preserved.

    Args:
        model: model to allocate.
        device: device of the tensors; None for the layout's device, or the CPU without a layout.
        elsewhere: mapping from the name of a module on another device to that device.
    """
    # This includes buffers that no checkpoint contains: adapters infer their device from a buffer.
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        sharded = next((p for p in tensors if is_distributed(p)), None)
        if device is None:
            device = sharded.device_mesh.device_type if sharded is not None else "cpu"
        ties = _tied_names(model)
        for name, other in (elsewhere or {}).items():
            model.get_submodule(name)._apply(partial(_allocate, other))
        model._apply(partial(_allocate, device))
        for first, *others in ties:
            _tie_(model, first, others)


def _allocate(device: torch.device | str, tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor


def _tied_names(model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _tie_(model: nn.Module, first: str, others: list[str]) -> None:
    """Tie parameters again after `to_empty` allocated them separately."""
    parameter = model.get_parameter(first)
    for name in others:
        owner, _, leaf = name.rpartition(".")
        if model.get_parameter(name) is not parameter:
            setattr(model.get_submodule(owner), leaf, parameter)


def init_weights_(model: Any, seed: int = 0, *, device: torch.device | str | None = None) -> Any:
    """Initialize all weights of a model with the same values on every layout; return the model.

    Args:
        model: `Model`, on a device, on the meta device, or parallelized.
        seed: random seed of the initialization.
        device: device for a model on the meta device; None for the layout's device, or the CPU
            without one.
    """
    materialize_(model, device)
    for name, tensor in persistent_tensors(model).items():
        if not is_streamed(tensor):
            init_tensor_(model, tensor, name, seed)
    return model


def weight_initializer(model: Any, seed: int = 0) -> Callable[[str, Tensor], None]:
    """Return a function (name, target) that initializes a tensor as `init_weights_` does."""
    return lambda name, target: init_tensor_(model, target, name, seed)


def init_tensor_(model: Any, tensor: Tensor, name: str, seed: int) -> None:
    """Initialize a tensor as its module's `tensor_notes` define.

    Without `tensor_notes`, norm weights are 1, biases are 0, and other weights N(0, std^2).

    Raises:
        TypeError: `tensor_notes` define no initial value of a buffer.
    """
    initial_value = getattr(model, "initial_value", None)  # missing in a user's own model
    if initial_value is not None and (value := initial_value(name)) is not None:
        copy_part_(tensor, value)
        return
    owner, _, key = name.rpartition(".")
    note = tensor_notes(model.get_submodule(owner)).get(key)
    if note is not None:
        base = f"{owner}.{note.initial.base}" if isinstance(note.initial, Derived) else name
        init_from_note_(tensor, name, note, model.init_std(base), seed)
    elif not tensor.is_floating_point() or (
        key in model.get_submodule(owner)._buffers and not key.endswith("bias")
    ):
        raise TypeError(
            f"{name} has no initialization rule: its module must define tensor_notes "
            "(docs/explanation/changed_models.md)."
        )
    elif name.endswith("norm.weight"):
        fill_(tensor, 1.0 - getattr(model.get_submodule(owner), "offset", 0.0))
    elif name.endswith("bias"):
        fill_(tensor, 0.0)
    else:
        sample_normal_(tensor, name, model.init_std(name), seed)

"""Drawing a model's weights so that every layout draws the same ones; see `nn.draw`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from bmforge.nn.draw import draw_normal_, draw_tensor_, fill_
from bmforge.nn.part import Derived, tensor_notes
from bmforge.shards import is_streamed
from bmforge.surgery import persistent_tensors

__all__ = [
    "NoDrawing",
    "init_tensor_",
    "init_weights_",
    "materialize_",
    "weight_drawer",
]


class NoDrawing(TorchFunctionMode):
    """Inside it modules are built without drawing weights, which `init_weights_` or loading sets.

    On meta nothing would be drawn either, but torch imports its compiler for it: seconds.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Leave out the functions of `torch.nn.init`, which return the tensor they are given."""
        if getattr(func, "__module__", None) == nn.init.__name__:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def materialize_(
    model: nn.Module,
    device: torch.device | str | None = None,
    elsewhere: Mapping[str, torch.device] | None = None,
) -> None:
    """Give memory to a model built on meta; ties, layouts and already real tensors stay.

    Args:
        model: whose tensors they are.
        device: where; None takes the layout's, else the CPU.
        elsewhere: modules that are on other devices, by name.
    """
    tensors = persistent_tensors(model).values()
    if any(tensor.is_meta for tensor in tensors):
        sharded = next((p for p in tensors if isinstance(p, DTensor)), None)
        if device is None:
            device = sharded.device_mesh.device_type if sharded is not None else "cpu"
        ties = _tied_names(model)
        for name, other in (elsewhere or {}).items():
            model.get_submodule(name)._apply(partial(_give_memory, other))
        model._apply(partial(_give_memory, device))
        for first, *others in ties:
            _tie_(model, first, others)


def _give_memory(device: torch.device | str, tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor


def _tied_names(model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _tie_(model: nn.Module, first: str, others: list[str]) -> None:
    """Make the parameters one again where `to_empty` gave each its own memory."""
    parameter = model.get_parameter(first)
    for name in others:
        owner, _, leaf = name.rpartition(".")
        if model.get_parameter(name) is not parameter:
            setattr(model.get_submodule(owner), leaf, parameter)


def init_weights_(model: Any, seed: int = 0, *, device: torch.device | str | None = None) -> Any:
    """Draw every weight of a model, with the same result on every layout; return the model.

    Args:
        model: a `Model`: plain, on meta, or laid out by `parallelize`.
        seed: decides all of them.
        device: where a model on meta comes to live; None takes its layout's, else the CPU.
    """
    materialize_(model, device)
    for name, tensor in persistent_tensors(model).items():
        if not is_streamed(tensor):
            init_tensor_(model, tensor, name, seed)
    return model


def weight_drawer(model: Any, seed: int = 0) -> Callable[[str, Tensor], None]:
    """Return what draws one tensor of `model` when it is asked for, as `init_weights_` does."""
    return lambda name, target: init_tensor_(model, target, name, seed)


def init_tensor_(model: Any, tensor: Tensor, name: str, seed: int) -> None:
    """Fill one tensor of a model: as its part says, else norm weights with 1, biases with 0 and
    matrices from N(0, std^2).

    Raises:
        TypeError: a buffer that no part describes, which nobody knows how to fill.
    """
    owner, _, key = name.rpartition(".")
    note = tensor_notes(model.get_submodule(owner)).get(key)
    if note is not None:
        base = f"{owner}.{note.draw.base}" if isinstance(note.draw, Derived) else name
        draw_tensor_(tensor, name, note, model.init_std(base), seed)
    elif not tensor.is_floating_point() or key in model.get_submodule(owner)._buffers:
        raise TypeError(
            f"nothing says how {name} is drawn: its module needs tensor_notes (docs/changes.md)."
        )
    elif name.endswith("norm.weight"):
        fill_(tensor, 1.0)
    elif name.endswith("bias"):
        fill_(tensor, 0.0)
    else:
        draw_normal_(tensor, name, model.init_std(name), seed)

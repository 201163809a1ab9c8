"""Drawing weights so that every layout draws the same ones.

A weight is drawn in blocks of rows, each from a generator seeded by (seed, parameter name, block
number). A rank draws only the blocks that its rows touch, on the CPU, and copies its part.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bmforge.shards import is_streamed, local_box, local_tensor

__all__ = [
    "NoDrawing",
    "draw_normal_",
    "init_parameter_",
    "init_weights_",
    "materialize_",
    "weight_drawer",
]

# Fixed for ever: another block size would draw other weights.
_BLOCK_ELEMENTS = 1 << 16


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


def materialize_(model: nn.Module, device: torch.device | str | None = None) -> None:
    """Give memory to a model built on meta; ties, layouts and already real tensors stay."""
    if any(p.is_meta for p in model.parameters()):
        sharded = next((p for p in model.parameters() if hasattr(p, "device_mesh")), None)
        if device is None:
            device = sharded.device_mesh.device_type if sharded is not None else "cpu"
        ties = _tied_names(model)
        model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
        for first, *others in ties:
            _tie_(model, first, others)


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
    for name, parameter in model.named_parameters():
        if not is_streamed(parameter):
            init_parameter_(parameter, name, model.init_std(name), seed)
    return model


def weight_drawer(model: Any, seed: int = 0) -> Callable[[str, Tensor], None]:
    """Return what draws one parameter of `model` when it is asked for, as `init_weights_` does."""
    return lambda name, target: init_parameter_(target, name, model.init_std(name), seed)


def init_parameter_(parameter: Tensor, name: str, std: float, seed: int) -> None:
    """Fill one parameter: norm weights with 1, biases with 0, matrices from N(0, std^2)."""
    with torch.no_grad():
        if name.endswith("norm.weight"):
            local_tensor(parameter).fill_(1.0)
        elif name.endswith("bias"):
            local_tensor(parameter).zero_()
        else:
            draw_normal_(parameter, name, std, seed)


def draw_normal_(parameter: Tensor, name: str, std: float, seed: int) -> None:
    """Draw this process's part of a parameter from N(0, std^2)."""
    box = local_box(parameter)
    if box.numel == 0:
        return
    target = local_tensor(parameter)
    width = max(1, math.prod(parameter.shape[1:]))
    rows = max(1, _BLOCK_ELEMENTS // width)
    first, last = box.offsets[0], box.offsets[0] + box.lengths[0]
    for block in range(first // rows, (last - 1) // rows + 1):
        start = block * rows
        stop = min(start + rows, parameter.shape[0])
        drawn = torch.empty(stop - start, *parameter.shape[1:])
        drawn.normal_(0.0, std, generator=_generator(seed, name, block))
        low, high = max(start, first), min(stop, last)
        piece = drawn[(slice(low - start, high - start), *box.slices[1:])]
        target[low - first : high - first].copy_(piece)


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)

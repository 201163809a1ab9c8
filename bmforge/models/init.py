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
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from bmforge.nn.part import Derived, TensorNote, tensor_notes
from bmforge.shards import is_streamed, local_box, local_tensor
from bmforge.surgery import persistent_tensors

__all__ = [
    "NoDrawing",
    "draw_normal_",
    "draw_tensor_",
    "init_tensor_",
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
    tensors = persistent_tensors(model).values()
    if any(tensor.is_meta for tensor in tensors):
        sharded = next((p for p in tensors if isinstance(p, DTensor)), None)
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
        _fill_(tensor, 1.0)
    elif name.endswith("bias"):
        _fill_(tensor, 0.0)
    else:
        draw_normal_(tensor, name, model.init_std(name), seed)


def draw_tensor_(tensor: Tensor, name: str, note: TensorNote, std: float, seed: int) -> None:
    """Fill this process's part of a part's tensor.

    Args:
        tensor: what is filled.
        name: its whole name, which decides what is drawn.
        note: what its part says of it.
        std: of what it is derived from, where it is derived.
        seed: decides the rest.
    """
    draw = note.draw
    if isinstance(draw, Derived):
        owner = name.rpartition(".")[0]
        draw_normal_(tensor, f"{owner}.{draw.base}", std, seed, draw)
    elif isinstance(draw, float):
        draw_normal_(tensor, name, draw, seed)
    elif draw == "numbers":
        first = local_box(tensor).offsets[0]
        local = local_tensor(tensor.detach())
        local.copy_(torch.arange(first, first + local.shape[0]))
    else:
        _fill_(tensor, {"zeros": 0.0, "ones": 1.0}[draw])


@torch.no_grad()
def _fill_(tensor: Tensor, value: float) -> None:
    local_tensor(tensor).fill_(value)


@torch.no_grad()
def draw_normal_(
    tensor: Tensor,
    name: str,
    std: float,
    seed: int,
    made: Derived | None = None,
) -> None:
    """Draw this process's part of a tensor from N(0, std^2).

    Args:
        tensor: what is filled.
        name: decides with `seed` what is drawn.
        std: standard deviation.
        seed: likewise.
        made: how what is drawn, of another shape, becomes the tensor; None keeps it as it is.
    """
    box = local_box(tensor)
    if box.numel == 0:
        return
    target, shape = local_tensor(tensor), tuple(tensor.shape) if made is None else made.shape
    each = 1 if made is None else made.rows_each
    rows = max(1, _BLOCK_ELEMENTS // max(1, math.prod(shape[1:])))
    step = max(1, rows // each)
    first, last = box.offsets[0], box.offsets[0] + box.lengths[0]
    for entry in range(first // step * step, last, step):
        stop = min((entry + step) * each, shape[0])
        blocks = [
            _draw_block(name, std, seed, shape, rows, block)
            for block in range(entry * each // rows, (stop - 1) // rows + 1)
        ]
        behind = entry * each % rows
        drawn = (blocks[0] if len(blocks) == 1 else torch.cat(blocks))[behind:]
        drawn = drawn[: stop - entry * each]
        drawn = drawn if made is None else made.turn(drawn)
        low, high = max(entry, first), min(entry + drawn.shape[0], last)
        piece = drawn[(slice(low - entry, high - entry), *box.slices[1:])]
        target[low - first : high - first].copy_(piece)


def _draw_block(
    name: str, std: float, seed: int, shape: tuple[int, ...], rows: int, block: int
) -> Tensor:
    """Return the rows of one block."""
    count = min(rows, shape[0] - block * rows)
    return torch.empty(count, *shape[1:]).normal_(0.0, std, generator=_generator(seed, name, block))


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)

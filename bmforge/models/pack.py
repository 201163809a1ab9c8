"""Packing a model's weights as integers: in memory, and while they are read.

What is kept as integers are linear layers, experts, the token embedding and the head; norms,
biases, routers and tables of positions stay floats. A quantised model remembers it as a change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import torch
from torch import nn

from bmforge.errors import ConfigError
from bmforge.logging import track
from bmforge.models.changes import Change, apply_change_
from bmforge.models.formats.hf_format import WeightFiles
from bmforge.models.init import materialize_
from bmforge.models.load import weight_reader
from bmforge.nn.low_rank import linear_sizes
from bmforge.nn.moe import Experts
from bmforge.nn.packing import QuantSpec, find_preset
from bmforge.nn.quantized import MatrixStore, PackedStore, QuantizedExperts
from bmforge.surgery import find_repeated_blocks, match_glob, persistent_tensors

__all__ = ["find_targets", "load_quantized", "quantize_"]

M = TypeVar("M", bound=nn.Module)


def quantize_(model: M, scheme: str | QuantSpec, *, where: Sequence[str] | None = None) -> M:
    """Keep the weights of a model as integers, in place; return it.

    Args:
        model: of ours, which remembers it in its config, or any other: torch's linear layers and
            transformers' Conv1D are known.
        scheme: a name in `nn.packing.PRESETS`, or what it stands for.
        where: name globs of modules; None takes a model's `quantize_targets`, or all linear layers
            in the repeated blocks of another one.

    Raises:
        ConfigError: an unknown scheme, a layer whose width does not fit it (with those that would),
            or one that is quantised already; the model is as it was then.
    """
    spec = find_preset(scheme)
    change = Change("quantize", tuple(where or find_targets(model)), asdict(spec))
    if hasattr(model, "change_"):
        model.change_(change)
    else:
        apply_change_(model, change)
    return model


def find_targets(model: Any) -> list[str]:
    """Return globs of what is quantised in a model where nobody says so.

    Raises:
        ConfigError: there is nothing.
    """
    names = [name for name, _ in model.named_modules()]
    if hasattr(model, "layout_rules"):
        globs = model.layout_rules().quantize_targets
        found = [glob for glob in globs if any(match_glob(name, glob) for name in names)]
    else:
        blocks = tuple(f"{name}." for name in find_repeated_blocks(model))
        found = [
            name
            for name, module in model.named_modules()
            if name.startswith(blocks)
            and (linear_sizes(module) is not None or isinstance(module, Experts))
        ]
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no layers that are usually quantised: name some in where=."
        )
    return found


def load_quantized(
    plain: Any,
    files: WeightFiles,
    scheme: str | QuantSpec,
    *,
    device: torch.device | str | None = None,
    new_head: bool = False,
) -> Any:
    """Read a model's weights and pack them one by one; the plain model is never in memory.

    Args:
        plain: the model on meta.
        files: a checkpoint of it.
        scheme: see `quantize_`.
        device: where the model comes to live; None is the CPU.
        new_head: draw the head's weights where the checkpoint has none that fit.

    Returns:
        the quantised model.

    Raises:
        CheckpointError: weights missing, unexpected or wrongly shaped.
        ConfigError: as `quantize_` does.

    Memory: the quantised model, and of the plain one a tensor at a time.
    """
    read = weight_reader(plain, files, new_head=new_head)
    described = {name: (t.shape, t.dtype) for name, t in persistent_tensors(plain).items()}
    model = quantize_(plain, scheme)
    materialize_(model, device)
    tensors = persistent_tensors(model)
    for name, (shape, dtype) in track(list(described.items()), "quantise"):
        owner, _, key = name.rpartition(".")
        store = model.get_submodule(owner)
        is_packed = isinstance(store, PackedStore) and name not in tensors
        target = tensors.get(name)
        read_into = target if target is not None and target.is_cpu else None
        values = torch.empty(shape, dtype=dtype) if read_into is None else read_into
        read(name, values.detach())
        if is_packed and isinstance(store, QuantizedExperts):
            store.fill_(key, values)
        elif is_packed and isinstance(store, MatrixStore):
            store.fill_(values)
        elif target is not None and read_into is None:
            target.data.copy_(values)
    return model

"""Packing a model's weights as integers: in memory, and while they are read.

What is kept as integers are linear layers, experts, the token embedding and the head; norms,
biases, routers and tables of positions stay floats. A quantised model remembers it as a change.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.logging import track
from bmforge.models.changes import Change, apply_change_
from bmforge.models.formats.hf_format import WeightFiles
from bmforge.models.init import materialize_
from bmforge.models.keep import KEEP, fill_kept_, keep_
from bmforge.models.load import weight_reader
from bmforge.nn.low_rank import linear_sizes
from bmforge.nn.moe import Experts
from bmforge.nn.packing import QuantSpec, find_preset
from bmforge.nn.quantized import PackedStore, QuantizedExperts
from bmforge.surgery import find_repeated_blocks, match_glob, persistent_tensors

__all__ = ["PackedReader", "find_targets", "load_quantized", "quantize_"]

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
        ConfigError: there is nothing, or all of it is quantised.
    """
    modules = dict(model.named_modules())
    if hasattr(model, "layout_rules"):
        globs = model.layout_rules().quantize_targets
        found = [glob for glob in globs if any(match_glob(name, glob) for name in modules)]
    else:
        blocks = tuple(f"{name}." for name in find_repeated_blocks(model))
        found = [
            name
            for name, module in modules.items()
            if name.startswith(blocks)
            and (linear_sizes(module) is not None or isinstance(module, Experts))
        ]
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no layers that are usually quantised: name some in where=."
        )
    targets = [modules[name] for glob in found for name in modules if match_glob(name, glob)]
    if all(isinstance(module, PackedStore) for module in targets):
        raise ConfigError(
            f"{type(model).__name__} is quantised already: take the model that it was made from."
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
        scheme: see `quantize_`; "keep" takes the integers that the checkpoint holds.
        device: where the model comes to live; None is the CPU.
        new_head: draw the head's weights where the checkpoint has none that fit.

    Returns:
        the quantised model.

    Raises:
        CheckpointError: weights missing, unexpected or wrongly shaped.
        ConfigError: as `quantize_` does.

    Memory: the quantised model, and of the plain one a tensor at a time.
    """
    read = PackedReader(plain, files, scheme, new_head)
    model = copy.deepcopy(read.model)
    materialize_(model, device)
    for name, target in track(list(persistent_tensors(model).items()), "quantise"):
        target.data.copy_(read(name))
    return model


class PackedReader:
    """Gives a quantised model's tensors by name, made of a plain checkpoint when asked for.

    Args:
        plain: the model on meta; it becomes the quantised one, on meta too.
        files: a checkpoint of it.
        scheme: see `quantize_`; "keep" takes the integers that the checkpoint holds.
        new_head: draw the head's weights where the checkpoint has none that fit.

    Attributes:
        model: the quantised model on meta.
    """

    def __init__(
        self,
        plain: Any,
        files: WeightFiles,
        scheme: str | QuantSpec,
        new_head: bool = False,
    ) -> None:
        self._read = weight_reader(plain, files, new_head=new_head)
        self._plain = {name: (t.shape, t.dtype) for name, t in persistent_tensors(plain).items()}
        self._keeps = scheme == KEEP
        self.model = keep_(plain, self._read) if self._keeps else quantize_(plain, scheme)
        self._last: tuple[str, dict[str, Tensor]] | None = None  # what was packed last

    def __call__(self, name: str) -> Tensor:
        """Return a tensor of the quantised model."""
        if name in self._plain:
            return self._values(name)
        owner, _, key = name.rpartition(".")
        store = self.model.get_submodule(owner)
        base = key.rpartition("_")[0] if isinstance(store, QuantizedExperts) else "weight"
        if self._last is None or self._last[0] != f"{owner}.{base}":
            self._last = None  # before the next one is made
            self._last = f"{owner}.{base}", self._pack(store, owner, base)
        return self._last[1][key]

    def _values(self, name: str) -> Tensor:
        shape, dtype = self._plain[name]
        values = torch.empty(shape, dtype=dtype)
        self._read(name, values)
        return values

    def _pack(self, described: nn.Module, owner: str, base: str) -> dict[str, Tensor]:
        """Return the packed tensors of one weight, or of one stack of experts."""
        store: Any = copy.copy(described)
        store._parameters = dict(described._parameters)
        is_stack = isinstance(described, QuantizedExperts)
        keys = [
            key
            for key, tensor in described.named_parameters(recurse=False)
            if tensor.is_meta and (not is_stack or key.startswith(f"{base}_"))
        ]
        for key in keys:
            made = torch.empty_like(store._parameters[key], device="cpu")
            store._parameters[key] = nn.Parameter(made, requires_grad=False)
        assert isinstance(store, PackedStore)
        if self._keeps:
            fill_kept_(store, base, f"{owner}.{base}", self._read)
        else:
            store.fill_(*([base] if is_stack else []), self._values(f"{owner}.{base}"))
        return {key: store._parameters[key].data for key in keys}

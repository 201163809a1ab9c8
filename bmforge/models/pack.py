"""Quantizes a model's weights, in memory or during loading.

Linear layers, experts, the token embedding and the head are quantized; norms, biases, routers and
position tables remain floats. A quantized model's config records the quantization as a change.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.logging import get_logger, track
from bmforge.models.changes import Change, apply_change_
from bmforge.models.formats.hf_format import WeightFiles
from bmforge.models.init import materialize_
from bmforge.models.integer_weights import KEEP, fill_kept_, keep_
from bmforge.models.load import weight_reader
from bmforge.nn.foreign_experts import PackedForeignExperts, is_foreign_experts
from bmforge.nn.low_rank import linear_sizes
from bmforge.nn.moe import Experts
from bmforge.nn.packing import QuantSpec, find_preset
from bmforge.nn.quantized import PackedStore, QuantizedExperts
from bmforge.nn.uncalled_modules import find_uncalled
from bmforge.records import swap_
from bmforge.surgery import find_repeated_blocks, match_glob, persistent_tensors

__all__ = ["PackedReader", "find_targets", "load_quantized", "quantize_"]

M = TypeVar("M", bound=nn.Module)
# Fraction of the blocks' weights that may remain floats (such as routers) without a warning.
_FEW_FLOATS = 0.05


def quantize_(model: M, scheme: str | QuantSpec, *, where: Sequence[str] | None = None) -> M:
    """Quantize the weights of a model in place; return the model.

    Args:
        model: bmforge model, whose config records the change, or any model with torch's linear
            layers or transformers' Conv1D.
        scheme: a name in `nn.packing.PRESETS`, or a `QuantSpec`.
        where: name globs of the modules to quantize; if None, the model's `quantize_targets` or,
            for models of other libraries, all linear layers in repeated blocks.

    Raises:
        ConfigError: the scheme is unknown, does not support a layer's width (the message lists
            schemes that do), or a layer is already quantized. The model is then unchanged.
    """
    spec = find_preset(scheme)
    change = Change("quantize", tuple(where or find_targets(model)), asdict(spec))
    if hasattr(model, "change_"):
        model.change_(change)
    else:
        apply_change_(model, change)
    if where is None:
        _warn_of_floats(model)
    return model


def find_targets(model: Any) -> list[str]:
    """Return name globs of the modules that are quantized by default.

    Raises:
        ConfigError: the model has no modules that are quantized by default, or all of them are
            already quantized.
    """
    modules = dict(model.named_modules())
    if hasattr(model, "layout_rules"):
        globs = model.layout_rules().quantize_targets
        targets_found = [glob for glob in globs if any(match_glob(name, glob) for name in modules)]
    else:
        blocks = tuple(f"{name}." for name in find_repeated_blocks(model))
        targets_found = [
            name
            for name, module in modules.items()
            if name.startswith(blocks) and _is_packable(module)
        ]
        uncalled = set(find_uncalled(model, targets_found))
        targets_found = [name for name in targets_found if name not in uncalled]
    if not targets_found:
        raise ConfigError(
            f"{type(model).__name__} has no layers that are quantized by default. Select layers "
            "with where=."
        )
    targets = [
        modules[name] for glob in targets_found for name in modules if match_glob(name, glob)
    ]
    if all(isinstance(module, PackedStore) for module in targets):
        raise ConfigError(
            f"{type(model).__name__} is already quantized. Quantize the original model instead."
        )
    return targets_found


def _is_packable(module: nn.Module) -> bool:
    is_linear = linear_sizes(module) is not None
    return is_linear or isinstance(module, Experts) or is_foreign_experts(module)


def _warn_of_floats(model: Any) -> None:
    """Log a warning if more than 5 % of the blocks' weights remain floats."""
    blocks = tuple(f"{name}." for name in find_repeated_blocks(model))
    stores = {n for n, module in model.named_modules() if isinstance(module, PackedStore)}
    packed, floats = 0, Counter[str]()
    for name, parameter in model.named_parameters():
        if not name.startswith(blocks):
            continue
        owner = name.rpartition(".")[0]
        if owner in stores:
            packed += parameter.numel()
        elif parameter.is_floating_point() and parameter.dim() > 1:
            floats[re.sub(r"(?<=\.)\d+(?=\.)", "*", name)] += parameter.numel()
    left = sum(floats.values())
    if left > _FEW_FLOATS * (left + packed):
        largest = ", ".join(name for name, _ in floats.most_common(3))
        get_logger().warning(
            "%d of %d weights in the blocks are not quantized, because bmforge does not "
            "support their layers. Most of them are in %s.",
            *(left, left + packed, largest),
        )


def load_quantized(
    plain: Any,
    files: WeightFiles,
    scheme: str | QuantSpec,
    *,
    device: torch.device | str | None = None,
    new_head: bool = False,
) -> Any:
    """Load weights and quantize them one by one; the full-precision model is never in memory.

    Args:
        plain: unquantized model on the meta device.
        files: checkpoint of the model.
        scheme: quantization scheme as in `quantize_`; "keep" loads the checkpoint's integers.
        device: device of the model (default: the CPU).
        new_head: initialize the head's weights if the checkpoint has none of this shape.

    Returns:
        quantized model

    Raises:
        CheckpointError: weights are missing, unexpected or have the wrong shape.
        ConfigError: see `quantize_`.

    Peak memory: the quantized model and one unquantized tensor.
    """
    read = PackedReader(plain, files, scheme, new_head)
    model = read.model
    for name, target in track(list(persistent_tensors(model).items()), "quantize"):
        values = read(name).to(device or "cpu")
        if isinstance(target, nn.Parameter):
            values = nn.Parameter(values, requires_grad=target.requires_grad)
        swap_(target, values)
    materialize_(model, device)  # buffers that no checkpoint contains
    return model


class PackedReader:
    """Computes a quantized model's tensors on demand from an unquantized checkpoint.

    Args:
        plain: unquantized model on the meta device, which is quantized in place.
        files: checkpoint of the model.
        scheme: quantization scheme as in `quantize_`; "keep" loads the checkpoint's integers.
        new_head: initialize the head's weights if the checkpoint has none of this shape.
        where: name globs of the modules to quantize; see `quantize_`.

    Attributes:
        model: quantized model on the meta device.
    """

    def __init__(
        self,
        plain: Any,
        files: WeightFiles,
        scheme: str | QuantSpec,
        new_head: bool = False,
        where: Sequence[str] | None = None,
    ) -> None:
        self._read = weight_reader(plain, files, new_head=new_head)
        self._plain = {name: (t.shape, t.dtype) for name, t in persistent_tensors(plain).items()}
        self._keeps = scheme == KEEP
        self.model = (
            keep_(plain, self._read) if self._keeps else quantize_(plain, scheme, where=where)
        )
        self._last: tuple[str, dict[str, Tensor]] | None = None  # last weight: name, tensors

    def __call__(self, name: str) -> Tensor:
        """Return the named tensor of the quantized model."""
        if name in self._plain:
            return self._values(name)
        owner, _, key = name.rpartition(".")
        store = self.model.get_submodule(owner)
        base = (
            key.rpartition("_")[0]
            if isinstance(store, (QuantizedExperts, PackedForeignExperts))
            else "weight"
        )
        if self._last is None or self._last[0] != f"{owner}.{base}":
            self._last = None  # free it before the next one is allocated
            self._last = f"{owner}.{base}", self._pack(store, owner, base)
        return self._last[1][key]

    def _values(self, name: str) -> Tensor:
        shape, dtype = self._plain[name]
        values = torch.empty(shape, dtype=dtype)
        self._read(name, values)
        return values

    def _pack(self, described: nn.Module, owner: str, base: str) -> dict[str, Tensor]:
        """Quantize the weight `owner`.`base`, or stack of experts; return a dict of its tensors."""
        store: Any = copy.copy(described)
        store._parameters = dict(described._parameters)
        is_stack = isinstance(described, (QuantizedExperts, PackedForeignExperts))
        keys = [
            key
            for key, tensor in described.named_parameters(recurse=False)
            if tensor.is_meta and (not is_stack or key.startswith(f"{base}_"))
        ]
        for key in keys:
            buffer = torch.empty_like(store._parameters[key], device="cpu")
            store._parameters[key] = nn.Parameter(buffer, requires_grad=False)
        assert isinstance(store, PackedStore)
        if self._keeps:
            fill_kept_(store, base, f"{owner}.{base}", self._read)
        else:
            store.fill_(*([base] if is_stack else []), self._values(f"{owner}.{base}"))
        return {key: store._parameters[key].data for key in keys}

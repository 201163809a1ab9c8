"""Loads the integer weights of GGUF, GPTQ and AWQ checkpoints without requantizing.

Weights that the packed layout can represent exactly are repacked without rounding. All other
weights are dequantized to floats.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from torch import nn

from bmforge.errors import ConfigError
from bmforge.logging import get_logger
from bmforge.models.changes import Change
from bmforge.models.load import WeightReader
from bmforge.nn.moe import Experts
from bmforge.nn.packing import PANEL_ROWS, QuantSpec
from bmforge.nn.products import pack_groups
from bmforge.nn.quantized import PackedStore
from bmforge.shards import Box
from bmforge.surgery import match_glob, persistent_tensors

__all__ = ["KEEP", "fill_kept_", "keep_", "layers_with_integers"]

KEEP = "keep"
# Number of integers that are packed at a time, so that they stay in the CPU cache.
_INTEGERS_AT_ONCE = 1 << 20


def keep_(plain: Any, read: WeightReader) -> Any:
    """Pack the layers whose stored integers can be loaded unchanged; return the model.

    Args:
        plain: unquantized model on the meta device.
        read: reader of the checkpoint.

    Raises:
        ConfigError: the checkpoint has no stored integers that can be loaded unchanged.
    """
    layers = layers_with_integers(plain, read)
    if not layers:
        raise ConfigError(
            "quantize='keep' has no effect: the checkpoint has no integer weights that quantized "
            "layers support (supported: GGUF, GPTQ and AWQ). Choose a scheme, such as "
            "quantize='int8'."
        )
    for spec, names in layers.items():
        plain.change_(Change("quantize", tuple(names), asdict(spec)))
        get_logger().info("%d layers keep their integer weights (%s)", len(names), _describe(spec))
    return plain


def layers_with_integers(plain: Any, read: WeightReader) -> dict[QuantSpec, list[str]]:
    """Return a dict from scheme to the layers whose stored integers can be loaded unchanged.

    Args:
        plain: unquantized model on the meta device.
        read: reader of the checkpoint.
    """
    layers: dict[QuantSpec, list[str]] = {}
    for name, tensors in _targets(plain):
        specs = {read.stored_spec(tensor) for tensor in tensors}
        spec = next(iter(specs))
        if len(specs) == 1 and spec is not None:
            layers.setdefault(spec, []).append(name)
    return layers


def _describe(spec: QuantSpec) -> str:
    group = f"groups of {spec.group_size}" if spec.group_size else "whole rows"
    return f"{spec.bits} bits, {group}{'' if spec.symmetric else ', with minima'}"


def _targets(model: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of every layer that can be packed, and the names of its weights."""
    names = {id(tensor): name for name, tensor in persistent_tensors(model).items()}
    globs = model.layout_rules().quantize_targets
    for name, module in model.named_modules():
        if not any(match_glob(name, glob) for glob in globs):
            continue
        keys = module.stack_sizes() if isinstance(module, Experts) else ("weight",)
        tensors = [getattr(module, key, None) for key in keys]
        if all(id(tensor) in names for tensor in tensors):
            yield name, [names[id(tensor)] for tensor in tensors]


def fill_kept_(store: nn.Module, base: str, name: str, read: WeightReader) -> None:
    """Fill a matrix or stack of a packed layer with the integers of a checkpoint.

    Args:
        store: packed layer with allocated parameters.
        base: name of the weight in the unquantized layer.
        name: full name of the weight in the model.
        read: reader of the checkpoint.
    """
    assert isinstance(store, PackedStore)
    spec, sizes = store.spec, getattr(store, "_sizes", None)
    if sizes is None:
        shape: tuple[int, ...] = (store.rows, store.columns)  # type: ignore[assignment]
    else:
        shape = sizes[base]
    *stack, rows, columns = shape
    step = max(1, _INTEGERS_AT_ONCE // columns // PANEL_ROWS) * PANEL_ROWS
    for number in range(stack[0]) if stack else (None,):
        for first in range(0, rows, step):
            count = min(step, rows - first)
            box = Box((first, 0), (count, columns))
            if number is not None:
                box = Box((number, first, 0), (1, count, columns))
            groups = read.read_groups(name, box)
            prefix = f"{base}_" if stack else ""
            panel, panels = first // PANEL_ROWS, -(-count // PANEL_ROWS)
            out = store.panels(f"{prefix}packed", panel, panels, number)
            store.put_(prefix, pack_groups(*groups, spec, out), panel, number)

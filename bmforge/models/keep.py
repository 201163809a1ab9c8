"""Weights that a checkpoint holds as integers already, kept so: of GGUF files, GPTQ and AWQ.

What our layout can say exactly is packed as it is, nothing is rounded again; what it cannot, and
what the checkpoint holds as floats, becomes floats.
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
from bmforge.nn.packing import PANEL_ROWS, Integers, QuantSpec, narrow_scales, pack_matrix
from bmforge.nn.quantized import PackedStore
from bmforge.shards import Box
from bmforge.surgery import match_glob, persistent_tensors

__all__ = ["KEEP", "fill_kept_", "keep_"]

KEEP = "keep"
# Integers that are packed at a time.
_INTEGERS_AT_ONCE = 1 << 22


def keep_(plain: Any, read: WeightReader) -> Any:
    """Put packed layers where a checkpoint holds integers that they can hold; return the model.

    Args:
        plain: the model on meta.
        read: reads the checkpoint.

    Raises:
        ConfigError: there are none.
    """
    found: dict[QuantSpec, list[str]] = {}
    for name, tensors in _targets(plain):
        specs = {read.stored_spec(tensor) for tensor in tensors}
        spec = next(iter(specs))
        if len(specs) == 1 and spec is not None:
            found.setdefault(spec, []).append(name)
    if not found:
        raise ConfigError(
            "the checkpoint holds no integers that packed layers can keep (quantize='keep' is for "
            "GGUF files, GPTQ and AWQ): name a scheme, such as 'int8'."
        )
    for spec, names in found.items():
        plain.change_(Change("quantize", tuple(names), asdict(spec)))
        get_logger().info("%d layers are kept as %s", len(names), _describe(spec))
    return plain


def _describe(spec: QuantSpec) -> str:
    group = f"groups of {spec.group_size}" if spec.group_size else "whole rows"
    return f"{spec.bits} bits, {group}{'' if spec.symmetric else ', with minima'}"


def _targets(model: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of every layer that can be packed, and those of its weights."""
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
    """Fill one matrix of a packed layer, or one stack, with the integers that a checkpoint holds.

    Args:
        store: the layer, whose parameters have memory.
        base: the weight's name in the plain layer.
        name: the same in the model.
        read: reads the checkpoint.
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
            found = read.read_groups(name, box)
            minima = None if found.minima is None else narrow_scales(found.minima, spec)
            integers = Integers(
                found.integers.flatten(1), narrow_scales(found.scales, spec), minima
            )
            prefix = f"{base}_" if stack else ""
            store.put_(prefix, pack_matrix(integers, spec), first // PANEL_ROWS, number)

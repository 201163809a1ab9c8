"""`wrapper`, which quantizes any module to int8 and limits its memory."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from bmforge.compat.bminf.blocks import TransformerBlockList, place_blocks_
from bmforge.compat.bminf.linear import QuantizedLinear
from bmforge.device import device_at
from bmforge.models.base import Model
from bmforge.models.quantize import quantize_
from bmforge.nn.low_rank import linear_sizes
from bmforge.nn.packing import PRESETS
from bmforge.records import units_of
from bmforge.surgery import replace_module_

__all__ = ["wrapper"]

_SCHEME = "int8-dynamic"


def wrapper(model: nn.Module, quantization: bool = True, memory_limit: float | None = None) -> Any:
    """Convert a model to int8 within a memory limit, in place, and return the model.

    Args:
        model: any module with weights. Linear layers (transformers' Conv1D too) become
            `QuantizedLinear`; a bmforge model is quantized as usual.
        quantization: True to quantize to int8.
        memory_limit: limit in bytes of all weights and buffers and of the streaming slots, one
            limit for all block lists together (default: 0.9 of the free memory of an accelerator;
            no limit on a CPU).

    Raises:
        ConfigError: the limit is too small (the message names the smallest possible one), or the
            model is quantized or streamed already.
    """
    limit = None if memory_limit is None else int(memory_limit)
    if quantization and linear_sizes(model) is not None:
        return QuantizedLinear(model).to(device_at())
    if quantization:
        _quantize_(model)
    if isinstance(model, nn.ModuleList):
        model = _as_list(model)
    _replace_lists_(model)
    place_blocks_(model, find_blocks(model), limit, device_at())
    return model


def _quantize_(model: nn.Module) -> None:
    """Replace linear layers with int8 ones; log the layers that cannot be quantized."""
    if isinstance(model, Model):
        quantize_(model, _SCHEME)
        return
    num_replaced, left = 0, []
    for name, module in dict(model.named_modules()).items():
        sizes = linear_sizes(module)
        if sizes is None or getattr(module, "weight", None) is None:
            continue
        if PRESETS[_SCHEME].fits(sizes[0]):
            replace_module_(model, name, QuantizedLinear(module))
            num_replaced += 1
        else:
            left.append(f"{name} ({PRESETS[_SCHEME].problem(sizes[0])})")
    if left:
        warnings.warn(f"these linear layers are not quantized: {', '.join(left)}.", stacklevel=3)
    elif not num_replaced:
        warnings.warn(
            f"quantization=True, but the {type(model).__name__} has no linear layers.", stacklevel=3
        )


def _as_list(layers: nn.ModuleList) -> TransformerBlockList:
    return TransformerBlockList(list(layers))


def _replace_lists_(model: nn.Module) -> None:
    """Make the outermost module lists callable, as BMInf does."""
    for key, child in list(model.named_children()):
        if type(child) is nn.ModuleList and len(child):
            setattr(model, key, _as_list(child))
        elif not isinstance(child, nn.ModuleList):
            _replace_lists_(child)


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that may be streamed: repeated layers, and members of module lists."""
    blocks = {unit.name: unit.module for unit in units_of(model) if unit.is_block}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            for key, child in module.named_children():
                full_name = f"{name}.{key}" if name else key
                runs = type(child).forward is not nn.Module.forward
                if (
                    runs
                    and not _overlaps(full_name, blocks)
                    and any(True for _ in child.parameters())
                ):
                    blocks[full_name] = child
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    return dict(sorted(blocks.items(), key=lambda entry: order[entry[0]]))


def _overlaps(name: str, blocks: dict[str, nn.Module]) -> bool:
    """Return True if a module contains one of the blocks, or is inside one."""
    return any(
        f"{block}.".startswith(f"{name}.") or f"{name}.".startswith(f"{block}.") for block in blocks
    )

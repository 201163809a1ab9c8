"""`wrapper`, which quantizes any module to int8 and limits its memory.

It uses BMInf's int8 linear layer, and its block list, which streams the blocks that exceed a memory
limit.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.device import device_at, is_host, memory_room_bytes
from bmforge.errors import ConfigError
from bmforge.infer.engine.budget import plan_weights
from bmforge.infer.engine.weights import place_
from bmforge.memory.naive_parallel import spread_blocks_
from bmforge.memory.streaming import Streamer
from bmforge.models.base import Model
from bmforge.models.quantize import quantize_
from bmforge.nn import quantized
from bmforge.nn.low_rank import linear_sizes
from bmforge.nn.packing import PRESETS, Integers, pack_matrix, unpack_values
from bmforge.records import units_of
from bmforge.surgery import replace_module_

__all__ = ["QuantizedLinear", "TransformerBlockList", "wrapper"]

_SCHEME = "int8-dynamic"
_PRESET = PRESETS[_SCHEME]
_LARGEST = 127


class QuantizedLinear(quantized.QuantizedLinear):
    """Linear layer with int8 weights (a scale per row) and int8 activations (a scale per token).

    Weights are packed for the kernels; `weight_quant` and `weight_scale` return them unpacked, as
    in BMInf. Only inputs get a gradient, computed with the dequantized weights.

    Args:
        linear: unquantized layer (its bias is not quantized), or transformers' Conv1D.

    Raises:
        ConfigError: the input width is not divisible by 4, or a weight is not finite.

    Source: BMInf 2.0: a row's scale is its absolute maximum / 127, its integers are rounded to
        nearest.
    """

    def __init__(self, linear: nn.Module) -> None:
        super().__init__(linear, _PRESET)
        weight: Tensor = linear.weight  # type: ignore[assignment]
        if weight.is_meta:
            return
        rows = (weight.t() if hasattr(linear, "nf") else weight).detach().float()
        scale = rows.abs().amax(1) / _LARGEST
        values = (rows / scale.where(scale > 0, 1.0)[:, None]).round().to(torch.int8)
        if bool(scale.isfinite().all()):
            self.take_packed_(pack_matrix(Integers(values, scale[:, None], None), _PRESET))
        else:
            self.fill_(rows)  # raises the error with its reason

    @property
    def weight_quant(self) -> Tensor:
        """Int8 weights, shape (out, in)."""
        return unpack_values(self.packed, self.spec)[: self.rows]

    @property
    def weight_scale(self) -> Tensor:
        """Scales of the weight rows: (out,) fp32."""
        return self._tensors()[1].transpose(1, 2).flatten()[: self.rows]


# Fraction of the free memory that BMInf uses by default.
_SHARE = 0.9


def place_blocks_(
    model: nn.Module, blocks: Mapping[str, nn.Module], limit_bytes: int | None, device: torch.device
) -> Streamer | None:
    """Move a model to a device within a memory limit; stream the blocks that do not fit.

    Args:
        model: model in memory; parameters of its blocks are frozen.
        blocks: dict from name to module of the blocks that may be streamed.
        limit_bytes: limit on weights, buffers and streaming slots (device memory for streamed
            blocks) in bytes (default: 0.9 of the free memory of an accelerator; no limit on a CPU).
        device: compute device.

    Raises:
        ConfigError: the limit is too small; the message names the smallest possible limit.
    """
    for block in blocks.values():
        block.requires_grad_(False)
    if limit_bytes is None:
        if is_host(device):
            return None
        limit_bytes = int(_SHARE * memory_room_bytes(device))
    plan = plan_weights(model, device, limit_bytes, blocks)
    return next(iter(place_(model, plan, None)[0]), None)


class TransformerBlockList(nn.ModuleList):
    """Sequential list of blocks; those that do not fit a memory limit are streamed.

    Iterating, indexing and slicing return the blocks, which load their weights when they run.
    Blocks may have different structures.

    Args:
        layers: the blocks.
        gpus: accelerator indices, or pairs of index and limit in bytes; blocks are divided over
            them in order. On a CPU the indices are ignored and only the limits apply. If
            `gpus` is empty, blocks are not moved.

    Raises:
        ConfigError: there are no blocks, or a limit is too small; the message names the smallest
            possible limit.
    """

    def __init__(
        self, layers: Sequence[nn.Module], gpus: Sequence[int | tuple[int, int | None]] = ()
    ) -> None:
        super().__init__(layers)
        places: dict[str, torch.device] = {}
        if gpus and not len(self):
            raise ConfigError("TransformerBlockList has no blocks. Pass at least one block.")
        self.requires_grad_(False)
        each = -(-len(self) // max(1, len(gpus)))
        for gpu, entry in enumerate(gpus):
            index, limit = entry if isinstance(entry, tuple) else (entry, None)
            numbers = range(len(self))[gpu * each : (gpu + 1) * each]
            if numbers:
                share = nn.ModuleDict({str(number): self[number] for number in numbers})
                place_blocks_(share, dict(share.items()), limit, device_at(index))
                places |= dict.fromkeys(share, device_at(index))
        spread_blocks_(self, {name: at for name, at in places.items() if not is_host(at)})

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run all blocks in sequence.

        Args:
            x: input of the first block.
            args: further arguments of every block.
            kwargs: keyword arguments of every block.
        """
        for block in self:
            x = block(x, *args, **kwargs)
        return x


def wrapper(model: nn.Module, quantization: bool = True, memory_limit: float | None = None) -> Any:
    """Convert a model to int8 within a memory limit, in place, and return the model.

    Args:
        model: any module with weights. Linear layers (transformers' Conv1D too) become
            `QuantizedLinear`; a bmforge model is quantized by `quantize_`.
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
        if _PRESET.fits(sizes[0]):
            replace_module_(model, name, QuantizedLinear(module))
            num_replaced += 1
        else:
            left.append(f"{name} ({_PRESET.problem(sizes[0])})")
    if left:
        warnings.warn(f"these linear layers are not quantized: {', '.join(left)}.", stacklevel=3)
    elif not num_replaced:
        warnings.warn(
            f"quantization=True, but the {type(model).__name__} has no linear layers that can "
            "be quantized. Leave quantization out.",
            stacklevel=3,
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

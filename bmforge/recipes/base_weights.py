"""Storage format of frozen base weights in adapter training: 16 bits, int8, int4 (QLoRA).

Source: Dettmers et al., "QLoRA: Efficient finetuning of quantized LLMs" (2023).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from bmforge.device import parse_dtype
from bmforge.errors import ConfigError
from bmforge.logging import track
from bmforge.models.formats.hf_format import WeightFiles
from bmforge.models.init import materialize_
from bmforge.models.pack import PackedReader, quantize_
from bmforge.nn.packing import QuantSpec, find_preset
from bmforge.shards import local_box, local_tensor
from bmforge.surgery import match_glob, persistent_tensors
from bmforge.tune.delta import list_deltas

__all__ = [
    "BaseDtype",
    "cast_frozen_",
    "check_base_dtype",
    "fill_packed_",
    "find_base_layers",
    "open_packed",
    "quantizes_base_on_load",
    "quantize_base_",
    "store_frozen_",
]

BaseDtype = Literal["fp32", "bf16", "fp16", "int8", "int4"]
_PACKED = ("int8", "int4")


def quantizes_base_on_load(config: Any) -> bool:
    """Return True if a run quantizes its base model while loading it."""
    return config.base_dtype in _PACKED


def check_base_dtype(config: Any) -> None:
    """Raise `ConfigError` if ``base_dtype`` conflicts with other options of a run."""
    dtype, precision = config.base_dtype, config.train.precision
    if dtype is None:
        return
    if config.adapter.kind is None:
        raise ConfigError(
            f"base_dtype={dtype!r} requires an adapter, so that the base model is "
            "frozen. Add --adapter lora, or remove base_dtype."
        )
    if dtype in _PACKED:
        _check_packed(config)
    elif dtype not in ("fp32", precision):
        raise ConfigError(
            f"base_dtype={dtype!r} needs train.precision={dtype!r}, not {precision!r}: a layer "
            f"cannot multiply fp32 activations with {dtype} weights. Add --precision {dtype}."
        )


def _check_packed(config: Any) -> None:
    dtype = config.base_dtype
    if config.init_from is None:
        raise ConfigError(
            f"base_dtype={dtype!r} quantizes pretrained weights. Pass the directory or hub id "
            "of a model with --model."
        )
    if config.changes or config.offload.weights or config.layout.is_tensor_parallel:
        raise ConfigError(
            f"base_dtype={dtype!r} does not support changes, offload.weights or layout.tp. "
            "Quantize the model first (bmforge quantize) and start from the result."
        )
    if config.adapter.merge:
        raise ConfigError(
            f"adapter.merge has no effect on a base model in {dtype!r}. Leave it out; `bmforge "
            "merge RUN --out DIR` merges the adapter into the 16-bit base model."
        )


def store_frozen_(model: nn.Module, config: Any) -> None:
    """Cast frozen fp32 parameters to the run's precision in place, unless ``base_dtype`` is fp32.

    The blocks compute in this precision anyway, so the results equal those of a run that keeps the
    frozen weights in fp32 and casts them in every step. The frozen weights need at most half the
    memory.

    Args:
        model: model on the meta device, with its adapter; a model without an adapter is not
            changed.
        config: the run's config.
    """
    precision = config.train.precision
    if config.adapter.kind is None or config.offload.weights or config.base_dtype == "fp32":
        return
    cast_frozen_(model, parse_dtype(precision))


def cast_frozen_(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the frozen fp32 parameters of a model on the meta device, in place."""
    for parameter in model.parameters():
        is_float = parameter.dtype == torch.float32
        if not parameter.requires_grad and is_float and parameter.is_meta:
            parameter.data = parameter.data.to(dtype)


def open_packed(model: Any, start: Path | None, config: Any) -> PackedReader | None:
    """Return a reader that quantizes the base model's weights; None for an unquantized base.

    Linear layers and experts of the blocks are quantized. Embeddings and the head stay in 16 bits,
    as in QLoRA: quantizing them causes the largest error, and modules_to_save may train them.

    Args:
        model: base model on the meta device; its layers are replaced by quantized ones.
        start: directory of the base model.
        config: the run's config.
    """
    if not quantizes_base_on_load(config):
        return None
    assert start is not None
    spec, names = find_base_layers(model, config.base_dtype)
    return PackedReader(model, WeightFiles(start), spec, config.new_head, names)


def quantize_base_(model: Any, scheme: str) -> None:
    """Quantize a model on the meta device as `open_packed` does, for the layout planner."""
    spec, names = find_base_layers(model, scheme)
    quantize_(model, spec, where=names)


def find_base_layers(model: Any, scheme: str) -> tuple[QuantSpec, list[str]]:
    """Return the quantization spec of a base model and the names of the quantized layers."""
    # Activations are not quantized, because gradients pass through the quantized layers.
    spec = replace(find_preset(scheme), activations="float")
    targets = model.layout_rules().quantize_targets
    names = [
        name
        for name, _ in model.named_modules()
        if ".layers." in f".{name}" and any(match_glob(name, target) for target in targets)
    ]
    return spec, names


def fill_packed_(model: nn.Module, read: PackedReader, device: torch.device) -> None:
    """Quantize this process's shards of the base weights and load them into a model.

    Args:
        model: parallelized model on the meta device; the tensors of its adapter are initialized
            later by `Delta.init_`.
        read: reader of the base weights.
        device: device of the model.
    """
    materialize_(model, device)
    skipped = {name for delta in list_deltas(model).values() for name in delta.names()}
    tensors = persistent_tensors(model)
    to_fill = [(name, tensor) for name, tensor in tensors.items() if name not in skipped]
    for name, tensor in track(to_fill, "quantize"):
        values = read(name)
        local_tensor(tensor.detach()).copy_(values[local_box(tensor).slices])

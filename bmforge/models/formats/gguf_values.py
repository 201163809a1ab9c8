"""Reads a model's tensors for the GGUF writer: quantized weights as floats or integers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bmforge.errors import CheckpointError, ConfigError
from bmforge.logging import get_logger
from bmforge.models.base import Model
from bmforge.nn.packed_store import PackedStore
from bmforge.nn.quantized import element_scales
from bmforge.surgery import persistent_tensors

__all__ = ["describe_plain", "find_scales", "find_values", "make_quantizer", "stored_parts"]

_CHUNK_VALUES = 1 << 22
_BLOCK = 32  # number of values in a Q8_0 block, which share an fp16 scale


def find_values(model: Model, kind: str) -> Callable[[str], Tensor]:
    """Return a function from tensor name in the unquantized model to dequantized tensor.

    Raises:
        ConfigError: packed weights would be quantized to 4 bits a second time.
    """
    tensors = persistent_tensors(model)
    stores = {n: m for n, m in model.named_modules() if isinstance(m, PackedStore)}
    if stores and kind == "q4_0":
        raise ConfigError(
            f"this {type(model).__name__} has quantized weights, which type 'q4_0' would "
            "quantize again. Use 'q8_0' or 'f16', or convert the unquantized model."
        )

    def load(name: str) -> Tensor:
        owner, _, key = name.rpartition(".")
        store = stores.get(owner)
        if store is None or name in tensors:
            return tensors[name].detach().cpu()
        return store.plain(key).detach().cpu()

    return load


def find_scales(model: Model, kind: str) -> Callable[[str], Tensor | None]:
    """Return a function from tensor name in the unquantized model to the tensor's scales.

    The function returns None for float tensors, and for integers with minima or outliers. With
    type "q8_0", a warning reports how many packed layers are quantized again.
    """
    stores = {n: m for n, m in model.named_modules() if isinstance(m, PackedStore)}
    again = [n for n, m in stores.items() if not _are_blocks(m)]
    if again and kind == "q8_0":
        get_logger().warning(
            (
                "%d of %d quantized layers, such as %s, are quantized again to Q8_0, because they "
                "have zero points, outlier columns, or a group size that is not a multiple of 32. "
                "Use 'f16' or 'bf16' to keep their values."
            ),
            *(len(again), len(stores), again[0]),
        )

    def load(name: str) -> Tensor | None:
        owner, _, key = name.rpartition(".")
        store = stores.get(owner)
        if store is None or key == "bias" or not _are_blocks(store):
            return None
        scales = element_scales(store, key)
        return None if scales is None else scales.cpu()

    return load


def _are_blocks(store: PackedStore) -> bool:
    """Return True if each group of 32 adjacent values has one scale, and no minima or outliers."""
    spec = store.spec
    return spec.symmetric and not spec.outlier_ratio and spec.group_size % _BLOCK == 0


def write_integers(values: Tensor, scales: Tensor) -> np.ndarray | None:
    """Return Q8_0 blocks as bytes, with the integers ``values / scales`` unchanged.

    Returns None if scales differ within a block or exceed the range of fp16.

    Shape:
        values and scales: (rows, columns), columns a multiple of 32
    """
    blocks = scales.float().reshape(-1, _BLOCK)
    each = blocks[:, :1]
    narrow = each.half()
    if not torch.equal(blocks, each.expand_as(blocks)) or not bool(narrow.isfinite().all()):
        return None
    quotients = values.float().reshape(-1, _BLOCK) / torch.where(each == 0, 1.0, each)
    integers = quotients.round().to(torch.int8)
    stored = torch.cat((narrow.contiguous().view(torch.uint8), integers.view(torch.uint8)), 1)
    flat: np.ndarray = stored.flatten().numpy()
    return flat


def describe_plain(model: Model) -> Model:
    """Return a copy of the model without quantization, on the meta device."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    plain = type(model).from_config(model.config.replace(changes=()), device="meta", dtype=dtype)
    plain.provenance = model.provenance
    return plain


def make_quantizer(gguf: Any, kind: str) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that quantizes fp32 rows to a tensor type with the package `gguf`."""
    number = gguf.GGMLQuantizationType[kind]
    return lambda values: gguf.quants.quantize(values, number)


def stored_parts(
    name: str,
    tensor: Tensor,
    kind: str,
    quantize: Callable[[np.ndarray], np.ndarray],
    scales: Tensor | None = None,
) -> Iterator[np.ndarray]:
    """Yield the bytes to store for a tensor, in chunks of rows."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    step = max(1, _CHUNK_VALUES // rows.shape[1])
    if scales is not None:
        exact = write_integers(rows, scales.reshape(rows.shape))
        if exact is not None:
            yield exact
            return
    for part in rows.split(step):
        if kind in ("F16", "BF16"):
            dtype = torch.float16 if kind == "F16" else torch.bfloat16
            narrow = part.to(dtype).contiguous()
            data = narrow.view(torch.int16).numpy()
        else:
            data = part.to(torch.float32).contiguous().numpy()
            # The scales of quantized blocks are fp16, so their range is checked too.
            narrow = torch.from_numpy(data)
            data = data if kind == "F32" else quantize(data)
        if not narrow.isfinite().all():
            raise CheckpointError(
                f"{name} has values that {kind} cannot represent: infinite, NaN, or larger than "
                "65504. Use the type 'bf16' or 'f32'."
            )
        yield data.reshape(-1).view(np.uint8)

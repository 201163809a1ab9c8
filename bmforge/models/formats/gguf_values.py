"""The tensors of a model as the writer of GGUF files takes them: packed ones as numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bmforge.errors import ConfigError
from bmforge.models.base import Model
from bmforge.nn.packed_store import PackedStore
from bmforge.surgery import persistent_tensors

__all__ = ["describe_plain", "find_values"]


def find_values(model: Model, kind: str) -> Callable[[str], Tensor]:
    """Return a function that reads a tensor by its plain name, packed weights dequantized.

    Raises:
        ConfigError: packed weights would be quantized to 4 bits again.
    """
    tensors = persistent_tensors(model)
    stores = {n: m for n, m in model.named_modules() if isinstance(m, PackedStore)}
    if stores and kind == "q4_0":
        raise ConfigError(
            f"this {type(model).__name__} has packed weights, which type 'q4_0' would "
            "round again. Use 'q8_0' or 'f16', or convert the original model."
        )

    def load(name: str) -> Tensor:
        owner, _, key = name.rpartition(".")
        store = stores.get(owner)
        if store is None or name in tensors:
            return tensors[name].detach().cpu()
        return store.plain(key).detach().cpu()

    return load


def describe_plain(model: Model) -> Model:
    """Return the model on meta as it would be without packed weights."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    plain = type(model).from_config(model.config.replace(changes=()), device="meta", dtype=dtype)
    plain.provenance = model.provenance
    return plain

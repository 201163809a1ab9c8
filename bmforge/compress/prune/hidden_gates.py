"""Gates on hidden features, attached to every module that writes hidden states.

The outputs of embeddings, attention, MLPs and layers before a head are multiplied by the gate, so
closed features are zero everywhere. Norms compute their statistics over the open features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from bmforge.compress.prune.apply_plan import hidden_dims
from bmforge.compress.prune.block_hooks import scale_input_, scale_output_
from bmforge.compress.prune.plan import blocks_of
from bmforge.errors import ConfigError
from bmforge.nn.gates import HiddenWidth
from bmforge.nn.norm import RMSNorm
from bmforge.surgery import wrap_forward_

__all__ = ["CHILD", "attach_hidden_gate_", "hidden_tensors"]

CHILD = "hidden_share"


def attach_hidden_gate_(model: Any, gate: HiddenWidth) -> None:
    """Attach a gate to every module of a model that writes hidden states.

    Raises:
        ConfigError: the family does not support reducing the hidden size.
    """
    places = _find_modules(model)
    for norm in places.norms.values():
        wrap_forward_(norm, partial(_normalize_open, gate, norm), "width")
    for module in places.writers.values():
        scale_output_(module, gate)
    if places.has_others:
        first = next(iter(blocks_of(model).values()))
        scale_input_(first, gate)
    model.add_module(CHILD, gate)


def hidden_tensors(model: Any) -> set[str]:
    """Return the names of the tensors that have a dim of the hidden size."""
    return {name for name, dims in _wide_dims(model).items() if dims}


def _wide_dims(model: Any) -> dict[str, list[int]]:
    if model.fixed_width:
        raise ConfigError(
            f"gates cannot prune the hidden size of a {type(model).__name__}: {model.fixed_width}. "
            "Remove 'hidden' from gates."
        )
    return hidden_dims(model, model.config.hidden_size // 2)


@dataclass
class _GatedModules:
    """Modules to which a hidden gate is attached.

    Attributes:
        writers: modules that write hidden features.
        norms: dict from the ``id`` of a norm over hidden features to the norm.
        has_others: whether the blocks have inputs other than token embeddings, such as image
            patches.
    """

    writers: dict[int, nn.Module] = field(default_factory=dict)
    norms: dict[int, Any] = field(default_factory=dict)
    has_others: bool = False


def _find_modules(model: Any) -> _GatedModules:
    width, modules = model.config.hidden_size, dict(model.named_modules())
    places, inside = _GatedModules(), tuple(f"{name}." for name in blocks_of(model))
    for block in blocks_of(model).values():  # the gate is applied after the all-reduce
        parts = (block.attn, block.cross_attn, block.mlp)
        places.writers |= {id(part): part for part in parts if part is not None}
    places.norms = {id(m): m for m in modules.values() if _has_width(m, width)}
    for name, dims in _wide_dims(model).items():
        module = modules[name.rpartition(".")[0]]
        if isinstance(module, (RMSNorm, nn.LayerNorm)) and dims:
            places.norms[id(module)] = module
        elif not dims or name.startswith(inside):
            continue
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            if _writes(module, dims):
                places.writers[id(module)] = module
        else:
            places.has_others = True
    return places


def _has_width(module: nn.Module, width: int) -> bool:
    """Return True for a norm over the hidden size, with or without weights."""
    return isinstance(module, nn.LayerNorm) and tuple(module.normalized_shape) == (width,)


def _writes(module: nn.Module, dims: list[int]) -> bool:
    return (1 if isinstance(module, nn.Embedding) else 0) in dims


def _normalize_open(
    gate: HiddenWidth, norm: Any, inner: Callable[[Tensor], Tensor], /, x: Tensor
) -> Tensor:
    """Forward wrapper of a norm: use only the open features; closed features stay 0."""
    values = gate().to(x.dtype)
    count = values.sum().clamp(min=1.0)
    wider = (x.shape[-1] / count).sqrt()
    if isinstance(norm, RMSNorm):
        return inner(x * wider) / wider
    mean = x.sum(-1, keepdim=True) / count
    out = inner((x + (1 - values) * mean) * wider)
    return out / wider if norm.bias is None else (out - norm.bias) / wider + norm.bias * values

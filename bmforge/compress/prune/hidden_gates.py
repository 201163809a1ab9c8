"""A gate on every hidden feature of a model: where it stands, and how it goes again.

Whatever writes hidden features is scaled by it: embeddings, attention, MLPs, layers before a head;
what reads them then reads zeros. Norms count the features that are open.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from bmforge.compress.prune.carry import hidden_dims
from bmforge.compress.prune.plan import blocks_of
from bmforge.errors import ConfigError
from bmforge.nn.gates import HiddenWidth
from bmforge.nn.norm import RMSNorm
from bmforge.surgery import unwrap_forward_, wrap_forward_, wrappers_of

__all__ = ["SLOT", "attach_hidden_gate_", "detach_hidden_gate_", "hidden_tensors"]

SLOT = "hidden_share"


def attach_hidden_gate_(model: Any, gate: HiddenWidth) -> None:
    """Let a gate stand wherever a model writes hidden features.

    Raises:
        ConfigError: the family's hidden states keep their width.
    """
    places = _find_places(model)
    for norm in places.norms.values():
        wrap_forward_(norm, partial(_count_open, gate, norm), "width")
    for module in places.writers.values():
        module.register_forward_hook(partial(_scale, gate))
    if places.has_others:
        first = next(iter(blocks_of(model).values()))
        first.register_forward_pre_hook(partial(_scale_before, gate))
    setattr(model, SLOT, gate)


def detach_hidden_gate_(model: Any) -> None:
    """Take the gate away again."""
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [k for k, h in hooks.items() if getattr(h, "func", None) in _HOOKS]:
                del hooks[key]
        if "width" in dict(wrappers_of(module)):
            unwrap_forward_(module, "width")
    delattr(model, SLOT)


def hidden_tensors(model: Any) -> set[str]:
    """Return the names of tensors that have a number, or more, for every hidden feature."""
    return {name for name, dims in _wide_dims(model).items() if dims}


def _wide_dims(model: Any) -> dict[str, list[int]]:
    if model.fixed_width:
        raise ConfigError(
            f"gates: the hidden states of a {type(model).__name__} keep their width: "
            f"{model.fixed_width}."
        )
    return hidden_dims(model, model.config.hidden_size // 2)


@dataclass
class _Places:
    """Where a gate stands.

    Attributes:
        writers: what writes hidden features, and
        norms: what norms them, by identity.
        has_others: there are tables of another kind in front of the blocks, as an image's patches.
    """

    writers: dict[int, nn.Module] = field(default_factory=dict)
    norms: dict[int, Any] = field(default_factory=dict)
    has_others: bool = False


def _find_places(model: Any) -> _Places:
    width, modules = model.config.hidden_size, dict(model.named_modules())
    found, inside = _Places(), tuple(f"{name}." for name in blocks_of(model))
    for block in blocks_of(model).values():  # behind a whole part, where processes have added up
        parts = (block.attn, block.cross_attn, block.mlp)
        found.writers |= {id(part): part for part in parts if part is not None}
    found.norms = {id(m): m for m in modules.values() if _has_width(m, width)}
    for name, dims in _wide_dims(model).items():
        module = modules[name.rpartition(".")[0]]
        if isinstance(module, (RMSNorm, nn.LayerNorm)) and dims:
            found.norms[id(module)] = module
        elif not dims or name.startswith(inside):
            continue
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            if _writes(module, dims):
                found.writers[id(module)] = module
        else:
            found.has_others = True
    return found


def _has_width(module: nn.Module, width: int) -> bool:
    """Tell whether it is a norm of hidden features that has no tensors to tell it by."""
    return isinstance(module, nn.LayerNorm) and tuple(module.normalized_shape) == (width,)


def _writes(module: nn.Module, dims: list[int]) -> bool:
    return (1 if isinstance(module, nn.Embedding) else 0) in dims


def _scale_before(gate: HiddenWidth, module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    return gate(given[0]), *given[1:]


def _scale(gate: HiddenWidth, module: nn.Module, given: Any, out: Any) -> Any:
    # Experts return beside it what their router has to say.
    return (gate(out[0]), *out[1:]) if isinstance(out, tuple) else gate(out)


def _count_open(
    gate: HiddenWidth, norm: Any, inner: Callable[[Tensor], Tensor], /, x: Tensor
) -> Tensor:
    """Norm the features that are open: statistics are over their number, the others stay 0."""
    values = gate().to(x.dtype)
    count = values.sum().clamp(min=1.0)
    wider = (x.shape[-1] / count).sqrt()
    if isinstance(norm, RMSNorm):
        return inner(x * wider) / wider
    mean = x.sum(-1, keepdim=True) / count
    out = inner((x + (1 - values) * mean) * wider)
    return out / wider if norm.bias is None else (out - norm.bias) / wider + norm.bias * values


_HOOKS = (_scale, _scale_before)

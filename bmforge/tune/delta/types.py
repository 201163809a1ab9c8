"""Lists the adapter types, and initializes all adapters of a model."""

from __future__ import annotations

from torch import nn

from bmforge.tune.delta.attached import deltas_of
from bmforge.tune.delta.base import AttachedDelta

__all__ = ["adapter_types", "init_deltas_"]


def adapter_types(base: type[AttachedDelta] = AttachedDelta) -> dict[str, type[AttachedDelta]]:
    """Return a dict from class name to adapter type: all subclasses that define a `peft_type`."""
    types: dict[str, type[AttachedDelta]] = {}
    for kind in base.__subclasses__():
        types |= {kind.__name__: kind} if "peft_type" in vars(kind) else {}
        types |= adapter_types(kind)
    return types


def init_deltas_(model: nn.Module, seed: int = 0) -> nn.Module:
    """Initialize the tensors of all adapters of a model at random, identically on every layout.

    Args:
        model: model with real (not meta) tensors; if adapters were attached on the meta device,
            call `load_weights_` first.
        seed: random seed of all tensors.
    """
    for delta in deltas_of(model).values():
        delta.init_(seed)
    return model

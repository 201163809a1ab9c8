"""Finds linear layers whose `weight` other modules access, and layers that get no gradient.

Some modules read the dtype or values of another module's weight, which does not exist after
quantization. Other layers only compute a discrete choice, such as the tokens that sparse attention
selects; no gradient flows through it, so adapters on these layers would never be trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["find_untrained", "track_weight_reads"]


@contextmanager
def track_weight_reads(model: nn.Module, *, hidden: bool = False) -> Iterator[set[str]]:
    """Context manager: collect the names of linear layers whose `weight` other code accesses.

    With `hidden`, such an access returns None, as it does for a quantized layer.

    In the context, the class of each `nn.Linear` is replaced, because reads of module attributes
    cannot be observed in a different way.
    """
    read: set[str] = set()
    layers = {name: m for name, m in model.named_modules() if type(m) is nn.Linear}
    for name, layer in layers.items():
        layer.__class__ = _watched_class(name, read, hidden)
    try:
        yield read
    finally:
        for layer in layers.values():
            layer.__class__ = nn.Linear


def _watched_class(name: str, read: set[str], hidden: bool) -> type[nn.Linear]:
    """Return a Linear class that adds `name` to `read` if code outside the class reads `weight`."""

    def note_read(layer: Any) -> Tensor | None:
        read.add(name)
        return None if hidden else layer._parameters["weight"]

    def forward(layer: Any, x: Tensor) -> Tensor:
        return F.linear(x, layer._parameters["weight"], layer._parameters["bias"])

    members = {"weight": property(note_read), "forward": forward}
    return type("WatchedLinear", (nn.Linear,), members)


def find_untrained(model: nn.Module, loss: Tensor) -> set[str]:
    """Return the names of linear layers that get no gradient from `loss`; frees its graph."""
    layers = {name: m for name, m in model.named_modules() if type(m) is nn.Linear}
    weights: list[Any] = [layer.weight for layer in layers.values()]
    gradients = torch.autograd.grad(loss, weights, allow_unused=True)
    return {name for name, g in zip(layers, gradients, strict=True) if g is None}

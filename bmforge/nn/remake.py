"""Dropping what is cheap to make again: outputs of norms and activations that projections keep.

A projection keeps its input for its weight's gradient. Where that input is a norm or an activation
of something that is kept anyway, backward makes it again: on GPT-2 shapes such inputs are
about a third of the stored activations. The values are the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["call_and_drop", "hold_weights"]


class _Dropped(NamedTuple):
    """What is kept in a tensor's place: how to make it again."""

    make: Callable[[], Tensor]
    shape: torch.Size


class _Pack:
    """Replaces one tensor by its recipe and leaves the others to the call around this one."""

    def __init__(self, value: Tensor, make: Callable[[], Tensor], outer: _Pack | None) -> None:
        # The address stands for the tensor, so that this hook does not keep it alive.
        self.address, self.count, self.make, self.outer = (
            value.data_ptr(),
            value.numel(),
            make,
            outer,
        )

    def __call__(self, tensor: Tensor) -> Any:
        plain = type(tensor) is Tensor and tensor.is_contiguous()
        if plain and tensor.data_ptr() == self.address and tensor.numel() == self.count:
            return _Dropped(self.make, tensor.shape)
        return tensor if self.outer is None else self.outer(tensor)


def _unpack(kept: Any) -> Tensor:
    if not isinstance(kept, _Dropped):
        return kept
    with torch.no_grad():
        return kept.make().view(kept.shape)


def hold_weights(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return what calls a module with the weights that it has now, whatever it has by then.

    Who swaps a model's parameters for one call (`torch.func.functional_call`, averaged weights) has
    put the others back before backward makes the module's output again.

    Args:
        module: without children that have parameters.
    """
    own = module._parameters
    held = dict(own)

    def run(x: Tensor) -> Tensor:
        now = dict(own)
        own.update(held)
        try:
            return module(x)
        finally:
            own.update(now)

    return run


def call_and_drop(
    function: Callable[[Tensor], Tensor], value: Tensor, make: Callable[[], Tensor]
) -> Tensor:
    """Return ``function(value)``; what it keeps of `value` for backward is made again by `make`.

    Does nothing special where that cannot help: without gradients, under `torch.compile` (which
    decides for itself), for tensor subclasses, and inside other people's saved-tensor hooks
    (recompute keeps nothing here anyway, and hooks of autograd do not nest).

    Args:
        function: uses `value`; may itself call this function.
        value: contiguous; alive during the call.
        make: returns the same values again, without randomness.
    """
    plain = type(value) is Tensor and value.is_contiguous()
    if not plain or not value.requires_grad or torch.compiler.is_compiling():
        return function(value)
    around = torch._C._autograd._top_saved_tensors_default_hooks(True)
    outer = None if around is None else around[0]
    if outer is not None and not isinstance(outer, _Pack):
        return function(value)
    with saved_tensors_hooks(_Pack(value, make, outer), _unpack):
        return function(value)

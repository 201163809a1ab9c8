"""Selective recomputation: norm and activation outputs are recomputed in backward.

A projection saves its input for the gradient of its weight. If that input is the norm or activation
of a tensor that is saved anyway, it is dropped and recomputed in backward, bit-identically. This
saves about a third of the stored activations on GPT-2 shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["call_and_drop", "capture_weights"]


class _Dropped(NamedTuple):
    """Placeholder for a saved tensor, with the function that recomputes the tensor."""

    make: Callable[[], Tensor]
    shape: torch.Size


class _Pack:
    """Saved-tensor hooks that drop one tensor and pass all others to the enclosing hooks."""

    def __init__(self, value: Tensor, make: Callable[[], Tensor], outer: _Pack | None) -> None:
        # The address identifies the tensor, so that this hook does not keep it alive.
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


def _unpack(saved: Any) -> Tensor:
    if not isinstance(saved, _Dropped):
        return saved
    with torch.no_grad():
        return saved.make().view(saved.shape)


def capture_weights(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a function that calls a module with its current weights, even if the weights change.

    `torch.func.functional_call` and averaged weights replace a model's parameters for one call
    only. When backward recomputes the module's output, the original parameters are already back.

    Args:
        module: module whose children have no parameters.
    """
    own = module._parameters
    weights = dict(own)

    def run(x: Tensor) -> Tensor:
        current = dict(own)
        own.update(weights)
        try:
            return module(x)
        finally:
            own.update(current)

    return run


def call_and_drop(
    function: Callable[[Tensor], Tensor], value: Tensor, make: Callable[[], Tensor]
) -> Tensor:
    """Return ``function(value)``; backward recomputes `value` by `make` instead of saving it.

    `value` is saved as usual where recomputation cannot help: without gradients, under
    `torch.compile` (which decides itself), for tensor subclasses, and inside other saved-tensor
    hooks (activation checkpointing saves nothing there, and autograd's hooks do not nest).

    Args:
        function: function of `value`; may call `call_and_drop` itself.
        value: contiguous tensor, alive during the call.
        make: deterministic function that returns `value` again.
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

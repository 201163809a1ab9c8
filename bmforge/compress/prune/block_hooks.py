"""Hooks and wrappers by which gates and probes act on layers, sublayers and blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bmforge.nn import Block
from bmforge.surgery import unwrap_forward_, wrap_forward_, wrappers_of

__all__ = ["Blend", "Scale", "blend_part_", "restore_", "scale_input_", "scale_output_"]

Scale = Callable[[Tensor], Tensor]
# Function (hidden states before, hidden states after a sublayer or block) -> hidden states that
# the model uses from then on.
Blend = Callable[[Tensor, Tensor], Tensor]


def scale_input_(module: nn.Module, scale: Scale) -> RemovableHandle:
    """Apply a function to a module's first input, before attached adapters and other hooks."""
    return module.register_forward_pre_hook(partial(_scale_input, scale), prepend=True)


def scale_output_(module: nn.Module, scale: Scale) -> RemovableHandle:
    """Apply a function to a module's output, after attached adapters."""
    return module.register_forward_hook(partial(_scale_output, scale))


def blend_part_(block: Block, part: str, blend: Blend) -> Callable[[], object]:
    """Replace the hidden states after a sublayer or a block by ``blend(before, after)``.

    In parallel blocks, a sublayer returns only what the block adds, and `before` is zero.

    Args:
        block: transformer block to change.
        part: "attn", "mlp" or "block".
        blend: function of the hidden states before and after the part.

    Returns:
        function that undoes the change

    Raises:
        ConfigError: the part is changed already.
    """
    module = block if part == "block" else block.get_submodule(f"{part}_residual")
    adds = module is not block and block.norm_place in ("parallel", "parallel_norms")
    wrap_forward_(module, partial(_blend, blend, adds), "gates")
    return partial(unwrap_forward_, module, "gates")


def restore_(model: nn.Module) -> None:
    """Remove all hooks of this module, and all wrappers of gates, from a model."""
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [k for k, h in hooks.items() if getattr(h, "func", None) in _HOOKS]:
                del hooks[key]
        for order_key, _ in wrappers_of(module):
            if order_key in ("gates", "width"):
                unwrap_forward_(module, order_key)


def _scale_input(scale: Scale, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return scale(args[0]), *args[1:]


def _scale_output(scale: Scale, module: nn.Module, args: Any, out: Any) -> Any:
    # Expert layers return a tuple: the output and the router's statistics.
    return (scale(out[0]), *out[1:]) if isinstance(out, tuple) else scale(out)


def _blend(
    blend: Blend, adds: bool, inner: Callable[..., Any], /, x: Tensor, *args: Any, **kwargs: Any
) -> Any:
    out = inner(x, *args, **kwargs)
    after, *more = out if isinstance(out, tuple) else (out,)
    after = blend(torch.zeros_like(after) if adds else x, after)
    return (after, *more) if isinstance(out, tuple) else after


_HOOKS = (_scale_input, _scale_output)

"""Activation checkpointing: blocks drop their activations and recompute them in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bmforge.surgery import wrap_forward_, wrappers_of

__all__ = ["apply_recompute_"]


def apply_recompute_(blocks: Iterable[nn.Module]) -> None:
    """Recompute every block's activations in backward; parameter names do not change.

    Blocks that run without gradients are not affected.

    Memory: a block saves only its input. Compute: one additional forward per block.
    """
    for block in blocks:
        if "recompute" not in dict(wrappers_of(block)):
            wrap_forward_(block, _recompute, "recompute")


def _recompute(inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return inner(*args, **kwargs)
    return checkpoint(inner, *args, use_reentrant=False, **kwargs)

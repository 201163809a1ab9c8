"""Activation checkpointing: blocks drop their activations and recompute them in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bmforge.logging import get_logger
from bmforge.surgery import wrap_forward_, wrappers_of

__all__ = ["apply_recompute_", "disable_caches_"]


def apply_recompute_(blocks: Iterable[nn.Module]) -> None:
    """Recompute every block's activations in backward; parameter names do not change.

    Blocks that run without gradients are not affected.

    Memory: a block saves only its input. Compute: one additional forward per block.
    """
    for block in blocks:
        # A second wrapper would run the forward twice in backward.
        if "recompute" not in dict(wrappers_of(block)):
            wrap_forward_(block, _recompute, "recompute")


def disable_caches_(model: nn.Module) -> None:
    """Switch off the KV cache of a transformers module by `config.use_cache`.

    A recomputed block would append its keys to the cache twice. Models of bmforge use a cache only
    if the caller passes one.
    """
    if hasattr(model, "foreign"):
        return
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    caching = [c for c in configs.values() if getattr(c, "use_cache", None) is True]
    for config in caching:
        config.use_cache = False
    if caching:
        get_logger().info(
            (
                "recompute=True: config.use_cache of %s is set to False, because recomputed blocks "
                "would fill a KV cache twice"
            ),
            type(model).__name__,
        )


def _recompute(inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return inner(*args, **kwargs)
    # The reentrant variant needs an input with a gradient, and frozen embeddings have none.
    return checkpoint(inner, *args, use_reentrant=False, **kwargs)

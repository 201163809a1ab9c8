"""Recompute: drop a block's activations in forward and make them again in backward."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["apply_recompute_"]


def apply_recompute_(blocks: Iterable[nn.Module]) -> None:
    """Make every block recompute its inside in backward; parameter names do not change.

    Memory: a block keeps its input only. Compute: one more forward of each block.
    """
    for block in blocks:
        # The forward is wrapped, not the module, so names stay and sharding hooks stay outside.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]

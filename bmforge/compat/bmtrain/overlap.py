"""Joins a model's blocks under one `fully_shard` root, so that each prefetches the next.

A single block is its own root. Blocks are joined when the first of them runs, not earlier:
`fully_shard` needs the complete tree and parameters on their final device.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from bmforge.compat.bmtrain.facade import Facade
from bmforge.compat.bmtrain.runtime import config

__all__ = ["join_blocks_"]


class _Root(nn.Module):
    """Parent module of the blocks; it has no parameters itself."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self) -> None:
        """Do nothing; calling it makes `fully_shard` join the blocks."""


def join_blocks_(block: Facade) -> None:
    """Join a block with the other blocks of its registered model and set up prefetching.

    Each block prefetches the next one in the same list or module.

    Memory: two blocks are gathered at a time.
    """
    _, find_model = block.__dict__.get("_claim", (0, lambda: block))
    model = find_model() or block
    blocks = dict.fromkeys(_inside(first) for first in _outermost(model) if _waits(first))
    root = _Root(list(blocks))
    fully_shard(root, mesh=config.world)
    for inner in blocks:
        inner.__dict__["_joined"] = True
    for parent in model.modules():
        row = [_inside(m) for m in parent.children() if isinstance(m, Facade)]
        for first, two in pairwise(m for m in row if m in blocks):
            first.set_modules_to_forward_prefetch([two])
            two.set_modules_to_backward_prefetch([first])
    root()


def _inside(block: Facade) -> Any:
    return block.__dict__["_module"]


def _waits(block: Facade) -> bool:
    inner = _inside(block)
    return isinstance(inner, FSDPModule) and "_joined" not in inner.__dict__


def _outermost(module: nn.Module) -> Iterator[Facade]:
    """Yield the outermost blocks of a model."""
    if isinstance(module, Facade):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)

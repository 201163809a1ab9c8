"""Counts bytes and elements per process on a parallelized copy with three blocks per stack."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bmforge.parallel.layout import TENSOR_AXES
from bmforge.shards import local_tensor
from bmforge.surgery import match_glob, persistent_tensors

__all__ = ["count_sharded", "find_ends", "held_bytes", "local_bytes"]

# The blocks of every stack; the second of each represents all others.
Stacks = Mapping[str, Sequence[nn.Module]]


@torch.no_grad()
def local_bytes(parameter: Tensor) -> int:
    """Return the size of this process's shard in bytes."""
    local = local_tensor(parameter)
    return local.numel() * local.element_size()


def held_bytes(
    model: nn.Module,
    stacks: Stacks,
    ends: tuple[set[str], set[str]],
    counts: Callable[[Tensor], bool],
) -> tuple[int, dict[str, int], tuple[int, int]]:
    """Return the local bytes of the tensors for which `counts` returns True.

    The result has the total, the bytes per block of each stack, and the bytes of each end.

    The ends are the modules before the first and after the last block, such as embedding and head.
    A tensor that both ends use, such as a tied head, is counted in the total but not per end.
    """

    def find(*modules: nn.Module) -> dict[int, Tensor]:
        counted = (
            t for module in modules for t in persistent_tensors(module).values() if counts(t)
        )
        return {id(tensor): tensor for tensor in counted}

    def size(tensors: Mapping[int, Tensor]) -> int:
        return sum(map(local_bytes, tensors.values()))

    first, last = (find(*(getattr(model, name) for name in names)) for names in ends)
    both = first.keys() & last.keys()
    alone = [size({k: t for k, t in end.items() if k not in both}) for end in (first, last)]
    middles = {name: size(find(blocks[1])) for name, blocks in stacks.items()}
    return size(find(model)), middles, (alone[0], alone[1])


def find_ends(model: nn.Module) -> tuple[set[str], set[str]]:
    """Return two lists of module names: before the blocks, and after the blocks."""
    ends = []
    rules: Any = getattr(model, "layout_rules", None)
    for globs in (rules().pipeline_first, rules().pipeline_last) if callable(rules) else ((), ()):
        named = (n for n, _ in model.named_children())
        ends.append({n for n in named if any(match_glob(n, glob) for glob in globs)})
    return ends[0], ends[1]


def count_sharded(model: nn.Module, stacks: Stacks) -> dict[str, int]:
    """Return the number of elements that ZeRO shards, per block of each stack.

    The key "" is for all elements outside the blocks.
    """

    def count(parameters: Iterable[Tensor]) -> int:
        return sum(_tensor_share(p) for p in {id(p): p for p in parameters}.values())

    counts = {name: count(blocks[1].parameters()) for name, blocks in stacks.items()}
    inside = {id(p) for blocks in stacks.values() for b in blocks for p in b.parameters()}
    counts[""] = count(p for p in model.parameters() if id(p) not in inside)
    return counts


def _tensor_share(parameter: Tensor) -> int:
    """Return the number of elements of a parameter after tensor parallelism, before ZeRO."""
    if not isinstance(parameter, DTensor):
        return parameter.numel()
    names = parameter.device_mesh.mesh_dim_names or ()
    cuts = [
        parameter.device_mesh.size(axis)
        for axis, (name, placement) in enumerate(zip(names, parameter.placements, strict=False))
        if name in TENSOR_AXES and placement.is_shard()
    ]
    return parameter.numel() // math.prod(cuts)

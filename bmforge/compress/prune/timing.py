"""Measures block times in milliseconds: attention and MLP at several sizes, interpolated."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bmforge.compress.prune.costs import Costs, SublayerCost
from bmforge.compress.prune.plan import blocks_of, heads_per_group
from bmforge.device import is_host
from bmforge.errors import ConfigError
from bmforge.nn import Block, BlockSpec

__all__ = ["measure_costs"]

_ROUNDS = 7
_SHARES = (0.25, 0.5, 0.75, 1.0)


def measure_costs(model: Any, seq_len: int) -> Costs:
    """Return the forward time of blocks for `seq_len` tokens, in milliseconds.

    Layers with equal specs are timed once. In a distributed run, all processes use the times of
    rank 0.

    Raises:
        ConfigError: the model has cross-attention or sparse attention, which cannot be timed.
    """
    times: dict[str, dict[str, SublayerCost]] = {}
    halves = {}
    for name, block in blocks_of(model).items():
        kind = repr(block.spec)
        if kind not in times:
            times[kind] = _time_halves(name, block, seq_len)
        halves[name] = times[kind]
    if dist.is_initialized() and dist.get_world_size() > 1:
        shared: list[Any] = [halves]
        dist.broadcast_object_list(shared)
        halves = shared[0]
    return Costs(halves)


def _time_halves(name: str, block: Block, seq_len: int) -> dict[str, SublayerCost]:
    spec, halves = block.spec, {}
    if spec.cross_attn is not None or (spec.attn is not None and spec.attn.global_tokens):
        raise ConfigError(
            f"{name} has cross-attention or global tokens, whose time is not measured. Use "
            'target="flops".'
        )
    alone = replace(spec, attn=None, mlp=None, layer_drop=0.0)
    if spec.attn is not None:
        units, each = spec.attn.num_kv_heads, heads_per_group(spec.attn)
        specs = {
            count: replace(
                alone, attn=replace(spec.attn, num_heads=count * each, num_kv_heads=count)
            )
            for count in _sizes(units)
        }
        halves["attn"] = _measure_sublayer(specs, units, block, seq_len)
    if spec.mlp is not None:
        units = spec.mlp.intermediate_size
        specs = {
            count: replace(alone, mlp=replace(spec.mlp, intermediate_size=count))
            for count in _sizes(units)
        }
        halves["mlp"] = _measure_sublayer(specs, units, block, seq_len)
    return halves


def _sizes(units: int) -> list[int]:
    return sorted({1, *(max(1, round(share * units)) for share in _SHARES)})


def _measure_sublayer(
    specs: dict[int, BlockSpec], units: int, block: Block, seq_len: int
) -> SublayerCost:
    """Return the cost of a sublayer in milliseconds, measured at several sizes."""
    like = next(block.parameters())
    x = torch.zeros(1, seq_len, block.spec.hidden_size, dtype=like.dtype, device=like.device)
    times = time_each([_build(spec, like) for spec in specs.values()], x)
    points, highest = [], 0.0
    for count, taken in zip(specs, times, strict=True):
        highest = max(highest, taken)  # make times monotonic in the number of units
        points.append((count, highest))
    first = points[0][1]
    return SublayerCost(first, (highest - first) / units, units, points=((0, first), *points))


def _build(spec: BlockSpec, like: Tensor) -> Block:
    block = Block(spec, 0).to(device=like.device, dtype=like.dtype).eval()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.fill_(0.01)
    return block


@torch.no_grad()
def time_each(blocks: Sequence[Block], x: Tensor) -> list[float]:
    """Return the time of each block in milliseconds: the median over several rounds.

    Each round runs every block once.
    """
    times: list[list[float]] = [[] for _ in blocks]
    for number in range(_ROUNDS + 1):
        for block, taken in zip(blocks, times, strict=True):
            _wait(x)
            start = time.perf_counter()
            block(x)
            _wait(x)
            if number:  # the first round is a warm-up
                taken.append(1000 * (time.perf_counter() - start))
    return [statistics.median(taken) for taken in times]


def _wait(x: Tensor) -> None:
    if not is_host(x.device):
        torch.accelerator.synchronize(x.device)

"""Cost model of blocks: parameters, FLOPs or measured time as a function of the kept units."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from bmforge.compress.prune.hidden_gates import hidden_tensors
from bmforge.compress.prune.plan import blocks_of, heads_per_group, query_order
from bmforge.nn import AttentionSpec, Block, MoESpec

__all__ = ["Costs", "SublayerCost", "count_costs"]


@dataclass(frozen=True)
class SublayerCost:
    """Cost of a sublayer (attention or MLP) of a block.

    Args:
        fixed: cost with 0 units, such as that of the norm and the output bias.
        each: cost of one unit: a key-value head with its query heads, or an MLP feature.
        units: number of units.
        always: fixed cost of the block's cross-attention, which is still counted if the
            self-attention is removed; 0 without cross-attention.
        always_each: cost of the block's cross-attention per unit, which is still counted if the
            self-attention is removed; pruning a head removes it from both attentions.
        points: measured (units, cost) pairs, starting at 0 units; if given, the cost is
            interpolated linearly, and `fixed` and `each` are not used.
        dims: number of prunable dims of all key-value heads (with rotary embeddings, of pairs of
            dims); the cost is proportional to the fraction of them that is kept.
    """

    fixed: float
    each: float
    units: int
    always: float = 0.0
    always_each: float = 0.0
    points: tuple[tuple[int, float], ...] = ()
    dims: int = 0

    @property
    def per_unit(self) -> float:
        """Cost saved by removing one unit."""
        return self.each + self.always_each

    def inside(self, count: Any) -> Any:
        """Return the cost of the sublayer with `count` units (a number or a tensor)."""
        if not self.points:
            return self.fixed + self.each * count
        total: Any = self.points[0][1]
        for (low, before), (high, after) in pairwise(self.points):
            slope = (after - before) / (high - low)
            total = total + slope * (_at_most(count, high) - _at_most(count, low))
        return total

    def whole(self, count: Any) -> Any:
        """Return the cost with `count` units, including cross-attention."""
        return self.inside(count) + self.always + self.always_each * count


def _at_most(count: Any, limit: int) -> Any:
    return count.clamp(max=limit) if isinstance(count, Tensor) else min(count, limit)


@dataclass(frozen=True)
class Costs:
    """Costs of all blocks, as a function of the open units, which are those that are not pruned.

    Args:
        blocks: dict from block name to the costs of the block's "attn" and "mlp".
        bare: costs at hidden size 0, like `blocks`; the cost at a hidden size between 0 and `width`
            is interpolated linearly. Empty if the hidden size is not pruned.
        width: hidden size.
    """

    blocks: Mapping[str, Mapping[str, SublayerCost]]
    bare: Mapping[str, Mapping[str, SublayerCost]] = field(default_factory=dict)
    width: int = 0

    @property
    def total(self) -> float:
        """Total cost of all blocks."""
        return float(self.expect({}))

    def expect(self, open_units: Mapping[tuple[str, str], Tensor]) -> Tensor:
        """Return the expected cost, given the probability that each unit is open.

        Args:
            open_units: dict from (block, kind) to the probability that each unit is open, 0 to 1.
                Kinds are "heads", "dims", "features", "attn", "mlp", "block", and ("", "hidden")
                for hidden features. Missing kinds are fully open.
        """
        some = next(iter(open_units.values()), torch.zeros(()))
        sums: dict[str, dict[str, Any]] = {}
        for (name, kind), value in open_units.items():
            sums.setdefault(name, {})[kind] = value.double().sum()
        total = some.new_zeros((), dtype=torch.float64)
        wide = {kind: value / self.width for kind, value in sums.pop("", {}).items()}
        for name in self.blocks:
            total = total + self.of_block(name, sums.get(name, {}) | wide)
        return total

    def of_block(self, name: str, open_now: Mapping[str, Any]) -> Any:
        """Return the cost of one block.

        Args:
            name: block name.
            open_now: dict from kind to the number of open units; for "hidden" the fraction of open
                features. Missing kinds are fully open.
        """
        total = _cost_of_kept(self.blocks[name], open_now)
        if "hidden" in open_now:
            bare = _cost_of_kept(self.bare[name], open_now)
            total = bare + open_now["hidden"] * (total - bare)
        return open_now.get("block", 1.0) * total


def _cost_of_kept(halves: Mapping[str, SublayerCost], open_now: Mapping[str, Any]) -> Any:
    """Return the cost of a block's attention and MLP if only the units in `open_now` are kept."""
    total: Any = 0.0
    for kind, units in (("attn", "heads"), ("mlp", "features")):
        half = halves.get(kind)
        if half is None:
            continue
        count = open_now.get(units, half.units)
        if half.dims and "dims" in open_now:
            count = count * open_now["dims"] / half.dims
        stays = half.always + half.always_each * count
        total = total + open_now.get(kind, 1.0) * half.inside(count) + stays
    return total


def count_costs(
    model: Any,
    target: Literal["parameters", "flops"] = "parameters",
    seq_len: int = 512,
    hidden: bool = False,
) -> Costs:
    """Return the cost of the attention and MLP of every block.

    Args:
        model: bmforge model of any family.
        target: "parameters", or "flops": forward and backward FLOPs per token of a sequence of
            `seq_len`, counted as in `ModelConfig.flops_per_token`.
        seq_len: sequence length for "flops".
        hidden: also count the part of the cost that does not depend on the hidden size.
    """
    count = partial(_flops_of, seq_len=seq_len) if target == "flops" else _parameters_of
    blocks = blocks_of(model)
    costs = {name: count(block, block.spec.hidden_size, ()) for name, block in blocks.items()}
    bare: dict[str, dict[str, SublayerCost]] = {}
    if hidden:
        wide = hidden_tensors(model)
        for name, block in blocks.items():
            own_wide = {n.removeprefix(f"{name}.") for n in wide if n.startswith(f"{name}.")}
            bare[name] = count(block, 0, own_wide)
    rope = getattr(getattr(model, "spec", None), "rope", None)
    for halves in (costs, bare):
        for name in halves:
            if (spec := blocks[name].spec.attn) is not None:
                dims = spec.num_kv_heads * spec.head_dim // (2 if query_order(spec, rope) else 1)
                halves[name]["attn"] = replace(halves[name]["attn"], dims=dims)
    return Costs(costs, bare, model.config.hidden_size)


def _parameters_of(block: Block, width: int, wide: Collection[str]) -> dict[str, SublayerCost]:
    """Return a dict from "attn" and "mlp" to the parameter counts of a block's sublayers.

    Args:
        block: block of any family.
        width: hidden size.
        wide: names of tensors that are not counted: (), or at hidden size 0 the tensors with a dim
            of the hidden size.
    """
    spec, halves = block.spec, {}
    count_of = partial(_numel, block, wide)
    own = {part: count_of(part) for part in ("attn", "cross_attn", "mlp")}
    if spec.attn is not None:
        units, each = _head_units(spec.attn)
        weights = each * _head_parameters(spec.attn, width)
        norm = 0 if spec.norm_place == "parallel" else count_of("attn_norm")
        # Longformer has a second set of q, k and v projections for global tokens.
        if spec.attn.global_tokens:
            weights += each * 3 * spec.attn.head_dim * (width + spec.attn.qkv_bias)
        always, more = 0.0, 0.0
        if spec.cross_attn is not None:
            more = each * _head_parameters(spec.cross_attn, width)
            always = own["cross_attn"] + count_of("cross_attn_norm") - more * units
        fixed = own["attn"] + norm + count_of("attn_out_norm") - weights * units
        halves["attn"] = SublayerCost(fixed, weights, units, always, more)
    if spec.mlp is not None:
        count = spec.mlp.intermediate_size
        weights = _feature_parameters(block, width)
        norm = 0 if spec.norm_place == "parallel" else count_of("mlp_norm")
        fixed = own["mlp"] + norm + count_of("mlp_out_norm") - weights * count
        halves["mlp"] = SublayerCost(fixed, weights, count)
    return halves


def _flops_of(
    block: Block, width: int, wide: Collection[str], *, seq_len: int
) -> dict[str, SublayerCost]:
    spec, halves = block.spec, {}
    if spec.attn is not None:
        units, each = _head_units(spec.attn)
        head = spec.attn.head_dim
        keys = 2 * head * width * spec.attn.num_kv_heads / units
        per_unit = 6 * (2 * each * head * width + keys) + 12 * each * head * seq_len
        more = per_unit if spec.cross_attn is not None else 0.0
        halves["attn"] = SublayerCost(0.0, per_unit, units, 0.0, more)
    if spec.mlp is not None:
        share = 1.0
        if isinstance(spec.mlp, MoESpec):
            share = spec.mlp.experts_per_token
        matrices = (3 if spec.mlp.gated else 2) * share
        halves["mlp"] = SublayerCost(0.0, 6 * matrices * width, spec.mlp.intermediate_size)
    return halves


def _numel(block: Block, without: Collection[str], part: str) -> int:
    module = getattr(block, part, None)
    named = () if module is None else module.named_parameters(prefix=part)
    return sum(parameter.numel() for name, parameter in named if name not in without)


def _head_units(spec: AttentionSpec) -> tuple[int, int]:
    """Return the number of units (key-value heads) and of query heads per unit."""
    return spec.num_kv_heads, heads_per_group(spec)


def _head_parameters(spec: AttentionSpec, width: int) -> float:
    """Return the parameter count of a query head, including its share of the KV head's."""
    bias = int(spec.qkv_bias)
    shared = 2 * (width + bias) / heads_per_group(spec)
    return spec.head_dim * (2 * width + bias + shared)


def _feature_parameters(block: Block, width: int) -> int:
    spec: Any = block.spec.mlp
    if isinstance(spec, MoESpec):
        return spec.num_experts * width * (3 if spec.gated else 2)
    return (width + spec.bias) * (2 if spec.gated else 1) + width

"""What a model's parts cost, and which of them go until a share of the cost is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bmforge.compress.prune.choose import choose_plan, shared_scores
from bmforge.compress.prune.importance import Scores
from bmforge.compress.prune.plan import Kept, Plan, blocks_of, heads_per_group
from bmforge.compress.prune.structure_config import StructureConfig, Target
from bmforge.errors import ConfigError
from bmforge.models.sizes import Sizes
from bmforge.nn import AttentionSpec, Block, MoESpec

__all__ = ["Costs", "Half", "count_costs", "plan_for_target"]


@dataclass(frozen=True)
class Half:
    """What one half of a block costs.

    Args:
        fixed: what it costs with none of its units: its norm, the last bias.
        each: what a unit adds: a head, or all heads of a key-value head, or a feature.
        units: how many it has.
        always: what stays where this half goes, as attention to a memory does: without units, and
        always_each: of every unit, which both attentions have alike.
    """

    fixed: float
    each: float
    units: int
    always: float = 0.0
    always_each: float = 0.0

    @property
    def per_unit(self) -> float:
        """What goes with a unit."""
        return self.each + self.always_each


@dataclass(frozen=True)
class Costs:
    """What all blocks cost: name -> "attn" or "mlp" -> what that half does."""

    blocks: Mapping[str, Mapping[str, Half]]

    @property
    def total(self) -> float:
        """What all of them cost together."""
        return float(self.expect({}))

    def expect(self, open_units: Mapping[tuple[str, str], Tensor]) -> Tensor:
        """Return what is left where gates are open so far.

        Args:
            open_units: (block, kind) -> how far each unit is open, 0 to 1; kinds are "heads",
                "features", "attn", "mlp", "block". Those that are not named are all open.
        """
        some = next(iter(open_units.values()), torch.zeros(()))
        sums: dict[str, dict[str, Any]] = {}
        for (name, kind), value in open_units.items():
            sums.setdefault(name, {})[kind] = value.double().sum()
        total = some.new_zeros((), dtype=torch.float64)
        for name in self.blocks:
            total = total + self.of_block(name, sums.get(name, {}))
        return total

    def of_block(self, name: str, open_now: Mapping[str, Any]) -> Any:
        """Return what is left of one block.

        Args:
            name: of the block.
            open_now: kind -> how many of its units are open; those that are not named all are.
        """
        total: Any = 0.0
        for kind, units in (("attn", "heads"), ("mlp", "features")):
            half = self.blocks[name].get(kind)
            if half is None:
                continue
            count = open_now.get(units, half.units)
            stays = half.always + half.always_each * count
            inside = half.fixed + half.each * count
            total = total + open_now.get(kind, 1.0) * inside + stays
        return open_now.get("block", 1.0) * total


def count_costs(model: Any, target: Target = "parameters", seq_len: int = 512) -> Costs:
    """Return what every block's halves cost.

    Args:
        model: of any family.
        target: "flops" are those of forward and backward for one token of a row of
            `seq_len`, counted as `ModelConfig.flops_per_token` does; else "parameters".
        seq_len: see there.
    """
    count = _flops_of if target == "flops" else _parameters_of
    return Costs({name: count(block, seq_len) for name, block in blocks_of(model).items()})


def _parameters_of(block: Block, seq_len: int) -> dict[str, Half]:
    """Return parameters: those of units by their specs, the rest is what is left over."""
    spec, found = block.spec, {}
    width = spec.hidden_size
    own = {part: _numel(block, part) for part in ("attn", "cross_attn", "mlp")}
    if spec.attn is not None:
        units, each = _head_units(spec.attn)
        weights = each * _head_parameters(spec.attn, width)
        norm = 0 if spec.norm_place == "parallel" else _numel(block, "attn_norm")
        # Longformer's global projections ask and answer with the same heads once more.
        if spec.attn.global_tokens:
            weights += each * 3 * spec.attn.head_dim * (width + spec.attn.qkv_bias)
        always, more = 0.0, 0.0
        if spec.cross_attn is not None:
            more = each * _head_parameters(spec.cross_attn, width)
            always = own["cross_attn"] + _numel(block, "cross_attn_norm") - more * units
        found["attn"] = Half(own["attn"] + norm - weights * units, weights, units, always, more)
    if spec.mlp is not None:
        count = spec.mlp.intermediate_size
        weights = _feature_parameters(block, width)
        norm = 0 if spec.norm_place == "parallel" else _numel(block, "mlp_norm")
        found["mlp"] = Half(own["mlp"] + norm - weights * count, weights, count)
    return found


def _flops_of(block: Block, seq_len: int) -> dict[str, Half]:
    spec, found = block.spec, {}
    if spec.attn is not None:
        units, each = _head_units(spec.attn)
        head = spec.attn.head_dim
        keys = 2 * head * spec.hidden_size * spec.attn.num_kv_heads / units
        per_unit = 6 * (2 * each * head * spec.hidden_size + keys) + 12 * each * head * seq_len
        more = per_unit if spec.cross_attn is not None else 0.0
        found["attn"] = Half(0.0, per_unit, units, 0.0, more)
    if spec.mlp is not None:
        share = 1.0
        if isinstance(spec.mlp, MoESpec):
            share = spec.mlp.experts_per_token
        matrices = (3 if spec.mlp.gated else 2) * share
        found["mlp"] = Half(0.0, 6 * matrices * spec.hidden_size, spec.mlp.intermediate_size)
    return found


def _numel(block: Block, part: str) -> int:
    module = getattr(block, part, None)
    return 0 if module is None else sum(p.numel() for p in module.parameters())


def _head_units(spec: AttentionSpec) -> tuple[int, int]:
    """Return how many units heads go in, and how many query heads one has."""
    return spec.num_kv_heads, heads_per_group(spec)


def _head_parameters(spec: AttentionSpec, width: int) -> float:
    """Return what one query head has, with its share of keys and values."""
    bias = int(spec.qkv_bias)
    shared = 2 * (width + bias) / heads_per_group(spec)
    return spec.head_dim * (2 * width + bias + shared)


def _feature_parameters(block: Block, width: int) -> int:
    spec: Any = block.spec.mlp
    if isinstance(spec, MoESpec):
        return spec.num_experts * width * (3 if spec.gated else 2)
    return (width + spec.bias) * (2 if spec.gated else 1) + width


def plan_for_target(model: Any, config: StructureConfig, scores: Scores) -> Plan:
    """Return the plan that leaves `keep_ratio` of the blocks' cost, the least important gone first.

    Raises:
        ConfigError: so little cannot be reached: every layer keeps a unit of each kind.
    """
    costs = count_costs(model, config.target, config.seq_len)
    limit, blocks = config.keep_ratio * costs.total, blocks_of(model)
    if config.uniform:
        return _uniform_plan(model, config, scores, costs)
    shared = shared_scores(model, blocks, scores)
    scores = {
        key: value
        for key, value in (scores | shared).items()
        if key[1] != "cross_heads" or (key[0], "heads") not in shared
    }
    counts = {
        (name, kind): half.units
        for name, halves in costs.blocks.items()
        for kind, half in halves.items()
    }
    ranked = _rank(costs, blocks, scores, config)
    left = costs.total
    dropped: dict[tuple[str, str], list[int]] = {}
    for _, name, kind, numbers in ranked:
        if left <= limit:
            break
        half = costs.blocks[name][kind]
        if counts[name, kind] - len(numbers) < _fewest(kind, config):
            continue
        counts[name, kind] -= len(numbers)
        left -= half.per_unit * len(numbers)
        dropped.setdefault((name, kind), []).extend(numbers)
    if left > limit:
        raise ConfigError(
            f"keep_ratio={config.keep_ratio} is out of reach: the least that heads and MLPs can "
            f"leave is {left / costs.total:.3f} of the blocks' {config.target}. Take blocks out "
            "first (num_layers)."
        )
    return _plan_of(blocks, dropped)


def _fewest(kind: str, config: StructureConfig) -> int:
    return config.multiple_of if kind == "mlp" else config.tensor_parallel


def _rank(
    costs: Costs, blocks: Mapping[str, Block], scores: Scores, config: StructureConfig
) -> list[tuple[float, str, str, list[int]]]:
    """Return what can go, the least important for what it costs first.

    Widths go in steps of `multiple_of`, heads of `tensor_parallel`. Taylor's numbers are all of one
    loss; others are compared within their kind and layer only.
    """
    found = []
    for name, halves in costs.blocks.items():
        for kind, half in halves.items():
            units = _unit_scores(blocks[name], kind, scores, name).double()
            if config.by != "taylor":
                units = units / units.mean().clamp(min=1e-30)
            ordered, index = units.sort(stable=True)
            order, values = index.tolist(), ordered.tolist()
            step = _fewest(kind, config)
            rest = len(order) % step
            starts = [(0, rest)] * bool(rest) + [
                (at, at + step) for at in range(rest, len(order), step)
            ]
            for first, last in starts:
                numbers = order[first:last]
                gain = sum(values[first:last]) / (last - first)
                worth = gain / half.per_unit if config.by == "taylor" else gain
                found.append((worth, name, kind, numbers))
    return sorted(found, key=lambda item: item[0])


def _unit_scores(block: Block, kind: str, scores: Scores, name: str) -> Tensor:
    if kind == "mlp":
        features = scores[name, "features"]
        return features.sum(0) if features.dim() == 2 else features
    spec = block.spec.attn
    assert spec is not None
    heads = scores[name, "heads"]
    if (name, "cross_heads") in scores:
        heads = heads + scores[name, "cross_heads"]
    return heads.view(spec.num_kv_heads, -1).sum(1)


def _plan_of(blocks: Mapping[str, Block], dropped: Mapping[tuple[str, str], list[int]]) -> Plan:
    """Return the plan that leaves out units of halves."""
    layers: dict[str, dict[str, Any]] = {}
    for (name, kind), numbers in dropped.items():
        spec = blocks[name].spec
        if kind == "mlp":
            assert spec.mlp is not None
            gone = set(numbers)
            stay = tuple(n for n in range(spec.mlp.intermediate_size) if n not in gone)
            is_stack = isinstance(spec.mlp, MoESpec)
            features: Any = (stay,) * spec.mlp.num_experts if is_stack else stay  # type: ignore[union-attr]
            layers.setdefault(name, {})["features"] = features
            continue
        assert spec.attn is not None
        each = heads_per_group(spec.attn)
        groups = [g for g in range(spec.attn.num_kv_heads) if g not in numbers]
        heads = tuple(g * each + h for g in groups for h in range(each))
        layers.setdefault(name, {})["heads"] = heads
        if spec.cross_attn is not None:
            layers[name]["cross_heads"] = heads
    return Plan({name: Kept(**options) for name, options in layers.items()})


def _uniform_plan(model: Any, config: StructureConfig, scores: Scores, costs: Costs) -> Plan:
    """Return the plan that leaves all layers alike: the same share of heads and of features."""
    limit = config.keep_ratio * costs.total
    attns = [halves["attn"] for halves in costs.blocks.values() if "attn" in halves]
    mlps = [halves["mlp"] for halves in costs.blocks.values() if "mlp" in halves]
    if len({half.units for half in attns}) > 1 or len({half.units for half in mlps}) > 1:
        raise ConfigError("uniform=True with a target needs layers that are alike now.")
    fixed = sum(half.fixed + half.always for half in (*attns, *mlps))
    per_head, per_feature = (sum(half.per_unit for half in halves) for halves in (attns, mlps))
    units, width = attns[0].units, mlps[0].units
    best: tuple[float, int, int] | None = None
    for heads in range(config.tensor_parallel, units + 1, config.tensor_parallel):
        room = (limit - fixed - heads * per_head) / per_feature
        features = min(width, int(room // config.multiple_of) * config.multiple_of)
        if features < config.multiple_of:
            continue
        uneven = abs(heads / units - features / width)
        if best is None or uneven < best[0]:
            best = uneven, heads, features
    if best is None:
        least = fixed + config.tensor_parallel * per_head + config.multiple_of * per_feature
        raise ConfigError(
            f"keep_ratio={config.keep_ratio} is out of reach: the least that equal layers can "
            f"leave is {least / costs.total:.3f} of the blocks' {config.target}."
        )
    sizes = {}
    for name, block in blocks_of(model).items():
        given: dict[str, Any] = {}
        if block.spec.attn is not None:
            each = heads_per_group(block.spec.attn)
            given = {"num_heads": best[1] * each, "num_kv_heads": best[1]}
        if block.spec.mlp is not None:
            given["intermediate_size"] = best[2]
        sizes[name] = Sizes(**given)
    return choose_plan(model, scores, sizes)

"""Builds a pruning plan that keeps a given fraction of a model's cost."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from bmforge.compress.prune.costs import Costs, count_costs
from bmforge.compress.prune.importance import Scores
from bmforge.compress.prune.make_plan import choose_plan, shared_scores
from bmforge.compress.prune.plan import KeptIndices, PruningPlan, blocks_of, heads_per_group
from bmforge.compress.prune.structure_config import StructureConfig
from bmforge.compress.prune.timing import measure_costs
from bmforge.errors import ConfigError
from bmforge.models.sizes import Sizes
from bmforge.nn import Block, MoESpec

__all__ = ["block_costs", "plan_for_target"]


def block_costs(model: Any, config: StructureConfig) -> Costs:
    """Return the costs of a model's blocks, in the unit of the config's target."""
    if config.target == "milliseconds":
        return measure_costs(model, config.seq_len)
    kind: Any = "flops" if config.target == "flops" else "parameters"
    return count_costs(model, kind, config.seq_len, "hidden" in config.gates)


def plan_for_target(model: Any, config: StructureConfig, scores: Scores) -> PruningPlan:
    """Return the plan that removes the least important units until the target cost is reached.

    Raises:
        ConfigError: the target cannot be reached, as every layer keeps at least one unit of
            each kind.
    """
    costs = block_costs(model, config)
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
        before = half.whole(counts[name, kind])
        counts[name, kind] -= len(numbers)
        left -= before - half.whole(counts[name, kind])
        dropped.setdefault((name, kind), []).extend(numbers)
    if left > limit:
        raise ConfigError(
            f"keep_ratio={config.keep_ratio} cannot be reached by pruning heads and MLPs "
            f"(allowed: at least {left / costs.total:.3f} of the {config.target} of the blocks). "
            "Remove blocks first (num_layers)."
        )
    return _plan_of(blocks, dropped)


def _fewest(kind: str, config: StructureConfig) -> int:
    return config.multiple_of if kind == "mlp" else config.tensor_parallel


def _rank(
    costs: Costs, blocks: Mapping[str, Block], scores: Scores, config: StructureConfig
) -> list[tuple[float, str, str, list[int]]]:
    """Return (score, block, kind, unit indices) of removable units, by importance per cost.

    The lowest score comes first. MLP features are removed in steps of `multiple_of`, heads in steps
    of `tensor_parallel`. Taylor scores are comparable across layers, since all estimate the change
    of the same loss; other scores are comparable only within a kind and layer.
    """
    removable = []
    for name, halves in costs.blocks.items():
        for kind, half in halves.items():
            units = _unit_scores(blocks[name], kind, scores, name).double()
            if config.by != "taylor":
                units = units / units.mean().clamp(min=1e-30)
            ordered, index = units.sort(stable=True)
            order, values = index.tolist(), ordered.tolist()
            step = _fewest(kind, config)
            remainder = len(order) % step
            starts = [(0, remainder)] * bool(remainder) + [
                (at, at + step) for at in range(remainder, len(order), step)
            ]
            for first, last in starts:
                numbers = order[first:last]
                gain = sum(values[first:last]) / (last - first)
                worth = gain / half.per_unit if config.by == "taylor" else gain
                removable.append((worth, name, kind, numbers))
    return sorted(removable, key=lambda item: item[0])


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


def _plan_of(
    blocks: Mapping[str, Block], dropped: Mapping[tuple[str, str], list[int]]
) -> PruningPlan:
    """Return the plan that removes the given heads and features."""
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
    return PruningPlan({name: KeptIndices(**options) for name, options in layers.items()})


def _uniform_plan(model: Any, config: StructureConfig, scores: Scores, costs: Costs) -> PruningPlan:
    """Return the plan that keeps the same fraction of heads and features in every layer."""
    limit = config.keep_ratio * costs.total
    attns = [halves["attn"] for halves in costs.blocks.values() if "attn" in halves]
    mlps = [halves["mlp"] for halves in costs.blocks.values() if "mlp" in halves]
    if len({half.units for half in attns}) > 1 or len({half.units for half in mlps}) > 1:
        raise ConfigError(
            "uniform=True with a target needs layers of equal size. Leave uniform out."
        )
    units, width = attns[0].units, mlps[0].units
    widths = range(config.multiple_of, width + 1, config.multiple_of)

    def cost(heads: int, features: int) -> float:
        return sum(h.whole(heads) for h in attns) + sum(h.whole(features) for h in mlps)

    best: tuple[float, int, int] | None = None
    for heads in range(config.tensor_parallel, units + 1, config.tensor_parallel):
        fitting = bisect_right(widths, limit, key=partial(cost, heads))
        if not fitting:
            continue
        features = widths[fitting - 1]
        uneven = abs(heads / units - features / width)
        if best is None or uneven < best[0]:
            best = uneven, heads, features
    if best is None:
        least = cost(config.tensor_parallel, config.multiple_of)
        raise ConfigError(
            f"keep_ratio={config.keep_ratio} cannot be reached with equal layers "
            f"(allowed: at least {least / costs.total:.3f} of the {config.target} of the blocks). "
            "Increase keep_ratio, or leave uniform out."
        )
    sizes = {}
    for name, block in blocks_of(model).items():
        options: dict[str, Any] = {}
        if block.spec.attn is not None:
            each = heads_per_group(block.spec.attn)
            options = {"num_heads": best[1] * each, "num_kv_heads": best[1]}
        if block.spec.mlp is not None:
            options["intermediate_size"] = best[2]
        sizes[name] = Sizes(**options)
    return choose_plan(model, scores, sizes)

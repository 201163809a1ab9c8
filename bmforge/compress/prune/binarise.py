"""From how likely every unit is open to which ones stay."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bmforge.compress.prune.costs import Costs
from bmforge.compress.prune.plan import Kept, Plan, blocks_of, heads_per_group
from bmforge.compress.prune.structure_config import GATE_KINDS, StructureConfig, wanted_sizes
from bmforge.errors import ConfigError
from bmforge.surgery import match_glob

__all__ = ["Chosen", "binarise", "open_units", "plan_of_units"]

# (block, kind) -> numbers of the units that stay
Chosen = dict[tuple[str, str], tuple[int, ...]]


def open_units(model: Any, config: StructureConfig) -> dict[tuple[str, str], float]:
    """Return which share of every layer's gates is to be open, where exact sizes are asked for.

    Raises:
        ConfigError: a size that has no gates, or that is no whole number of units.
    """
    if config.target != "sizes":
        return {}
    at_once = ("hidden_size", "head_dim", "num_experts", "num_layers", "attn_layers", "mlp_layers")
    if given := [name for name in at_once if getattr(config, name)]:
        raise ConfigError(
            f"gates reach num_heads, num_kv_heads and intermediate_size; choose {', '.join(given)} "
            "at once (gates=())."
        )
    found: dict[tuple[str, str], float] = {}
    blocks = blocks_of(model)
    for glob, sizes in wanted_sizes(model, config).items():
        for name, block in blocks.items():
            if not match_glob(name, glob):
                continue
            spec = block.spec
            if sizes.num_heads and spec.attn is not None:
                groups, each = spec.attn.num_kv_heads, heads_per_group(spec.attn)
                if sizes.num_heads % each or sizes.num_heads > spec.attn.num_heads:
                    raise ConfigError(
                        f"{name}: num_heads={sizes.num_heads} is no number of whole key-value "
                        f"heads, {each} query heads each; gates take those."
                    )
                found[name, "heads"] = sizes.num_heads // each / groups
            if sizes.intermediate_size and spec.mlp is not None:
                found[name, "features"] = sizes.intermediate_size / spec.mlp.intermediate_size
    lacking = {kind for _, kind in found} - set(config.gates)
    if lacking or not found:
        raise ConfigError(
            f"gates={config.gates} cannot reach sizes of {', '.join(sorted(lacking)) or 'nothing'}."
        )
    return found


def binarise(
    model: Any, config: StructureConfig, costs: Costs, likely: Mapping[tuple[str, str], Tensor]
) -> Chosen:
    """Return which units stay: the target is met, the least likely ones go.

    Raises:
        ConfigError: the target is out of reach: every layer keeps a unit of each kind, and its
            half unless that has a gate.
    """
    wanted = open_units(model, config)
    open_now = _order_shared(model, dict(likely))
    if wanted:
        chosen: Chosen = {}
        for key, value in open_now.items():
            count = round(wanted[key] * len(value)) if key in wanted else _likely_open(value)
            chosen[key] = _best(value, max(1, count))
        return chosen
    limit = config.keep_ratio * costs.total
    left = {key: set(range(len(value))) for key, value in open_now.items()}
    steps = sorted(_steps(open_now, config), key=lambda step: step[0])
    cost = {name: _cost(costs, name, left) for name in costs.blocks}
    for _, key, numbers in steps:
        if sum(cost.values()) <= limit:
            break
        _close_(left, key, numbers, config, costs)
        cost[key[0]] = _cost(costs, key[0], left)
    reached = sum(cost.values())
    if reached > limit:
        raise ConfigError(
            f"keep_ratio={config.keep_ratio} is out of reach of gates={config.gates}: the least "
            f"that they can leave is {reached / costs.total:.3f} of the blocks' {config.target}."
        )
    return {key: tuple(sorted(numbers)) for key, numbers in left.items()}


def _likely_open(value: Tensor) -> int:
    return int(value.sum().round())


def _steps(
    likely: Mapping[tuple[str, str], Tensor], config: StructureConfig
) -> list[tuple[float, tuple[str, str], list[int]]]:
    """Return what can be closed at a time, with how likely it is open."""
    found = []
    for (name, kind), value in likely.items():
        ordered, index = value.double().sort(stable=True)
        order, values = index.tolist(), ordered.tolist()
        size = {"features": config.multiple_of, "heads": config.tensor_parallel}.get(kind, 1)
        rest = len(order) % size
        borders = [0] * bool(rest) + list(range(rest, len(order), size)) + [len(order)]
        for first, last in itertools.pairwise(borders):
            mean = sum(values[first:last]) / (last - first)
            found.append((mean, (name, kind), order[first:last]))
    return found


def _close_(
    left: dict[tuple[str, str], set[int]],
    key: tuple[str, str],
    numbers: list[int],
    config: StructureConfig,
    costs: Costs,
) -> None:
    """Close units, but for the last ones of a half that stays."""
    kind = key[1]
    if kind in ("heads", "features"):
        fewest = config.multiple_of if kind == "features" else config.tensor_parallel
        if len(left[key]) - len(numbers) < fewest:
            return
    elif kind != "mlp" and _attentions_left(left, key, costs) < 1:
        return
    left[key] -= set(numbers)


def _attentions_left(
    left: Mapping[tuple[str, str], set[int]], key: tuple[str, str], costs: Costs
) -> int:
    """Return how many attentions its stack would have without this half or block."""
    stack = key[0].rpartition(".")[0]
    return sum(
        "attn" in halves
        and name != key[0]
        and bool(left.get((name, "attn"), {0}))
        and bool(left.get((name, "block"), {0}))
        for name, halves in costs.blocks.items()
        if name.rpartition(".")[0] == stack
    )


def _cost(costs: Costs, name: str, left: Mapping[tuple[str, str], set[int]]) -> float:
    """Return what is left of a block."""
    kinds = {kind: len(left[name, kind]) for kind in GATE_KINDS if (name, kind) in left}
    return float(costs.of_block(name, kinds))


def _best(value: Tensor, count: int) -> tuple[int, ...]:
    return tuple(sorted(value.argsort(descending=True, stable=True)[:count].tolist()))


def _order_shared(
    model: Any, likely: dict[tuple[str, str], Tensor]
) -> dict[tuple[str, str], Tensor]:
    """Let layers that share a bias with a column per head agree which heads matter.

    Each keeps how many it would have, of an order that is common to all of them.
    """
    for stack in dict.fromkeys(name.rpartition(".")[0] for name, _ in likely):
        owner = model.get_submodule(stack.rpartition(".")[0])
        mine = [key for key in likely if key[1] == "heads" and key[0].rpartition(".")[0] == stack]
        if getattr(owner, "rel_bias", None) is None or not mine:
            continue
        order = torch.stack([likely[key].double() for key in mine]).sum(0).argsort(stable=True)
        for key in mine:
            ranked = likely[key].clone()
            ranked[order] = likely[key].sort().values
            likely[key] = ranked
    return likely


def plan_of_units(model: Any, chosen: Chosen) -> Plan:
    """Return the plan that keeps these units."""
    layers: dict[str, dict[str, Any]] = {}
    gone, blocks = [], blocks_of(model)
    for (name, kind), numbers in chosen.items():
        block = blocks[name]
        mine = layers.setdefault(name, {})
        if kind == "block" and not numbers:
            gone.append(name)
        elif kind in ("attn", "mlp") and not numbers:
            mine[kind] = False
        elif kind == "features":
            mine["features"] = numbers
        elif kind == "heads":
            assert block.spec.attn is not None
            each = heads_per_group(block.spec.attn)
            heads = tuple(group * each + head for group in numbers for head in range(each))
            mine["heads"] = heads
            if block.spec.cross_attn is not None:
                mine["cross_heads"] = heads
    kept = {name: Kept(**_alone(options)) for name, options in layers.items() if name not in gone}
    return Plan(kept, tuple(gone))


def _alone(options: dict[str, Any]) -> dict[str, Any]:
    """Return what is said of a layer, without sizes of halves that go."""
    lost = set()
    if options.get("attn") is False and "cross_heads" not in options:
        lost |= {"heads"}
    if options.get("mlp") is False:
        lost |= {"features"}
    return {key: value for key, value in options.items() if key not in lost}

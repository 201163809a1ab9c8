"""Selects heads, features and blocks to keep from the probabilities that their gates are open."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bmforge.compress.prune.costs import Costs
from bmforge.compress.prune.plan import (
    KeptIndices,
    PruningPlan,
    blocks_of,
    heads_per_group,
    kept_groups,
    query_order,
)
from bmforge.compress.prune.structure_config import GATE_KINDS, StructureConfig, requested_sizes
from bmforge.errors import ConfigError
from bmforge.nn import AttentionSpec, Block
from bmforge.surgery import match_glob

__all__ = ["SelectedUnits", "binarize", "open_units", "plan_of_units"]

# (block, kind) -> indices of the kept units
SelectedUnits = dict[tuple[str, str], tuple[int, ...]]


def open_units(model: Any, config: StructureConfig) -> dict[tuple[str, str], float]:
    """Return the fraction of gates to keep open, by (block, kind); {} for a cost target.

    Raises:
        ConfigError: a size is set for a dimension without gates, or is not a multiple of the size
            of a unit.
    """
    if config.target != "sizes":
        return {}
    at_once = ["num_experts", "num_layers", "attn_layers", "mlp_layers"]
    at_once += [] if "hidden" in config.gates else ["hidden_size"]
    if given_names := [name for name in at_once if getattr(config, name)]:
        raise ConfigError(
            f"gates cannot determine {', '.join(given_names)} (supported: num_heads, num_kv_heads, "
            "head_dim, intermediate_size; hidden_size if gates has 'hidden'). Prune these sizes "
            "without gates (gates=())."
        )
    shares: dict[tuple[str, str], float] = {}
    if config.hidden_size:
        width = model.config.hidden_size
        if not 0 < config.hidden_size <= width:
            raise ConfigError(
                f"hidden_size={config.hidden_size} is out of range (allowed: 1 to {width}, the "
                "hidden size of the model)."
            )
        shares["", "hidden"] = config.hidden_size / width
    blocks = blocks_of(model)
    for glob, sizes in requested_sizes(model, config).items():
        for name, block in blocks.items():
            if not match_glob(name, glob):
                continue
            spec = block.spec
            if sizes.num_heads and spec.attn is not None:
                groups, each = spec.attn.num_kv_heads, heads_per_group(spec.attn)
                if sizes.num_heads % each or sizes.num_heads > spec.attn.num_heads:
                    raise ConfigError(
                        f"{name}: num_heads={sizes.num_heads} must be a multiple of {each}, the "
                        "number of query heads per key-value head, and at most "
                        f"{spec.attn.num_heads}."
                    )
                shares[name, "heads"] = sizes.num_heads // each / groups
            if sizes.head_dim and spec.attn is not None:
                shares[name, "dims"] = _share_of_dims(model, name, spec.attn, sizes.head_dim)
            if sizes.intermediate_size and spec.mlp is not None:
                shares[name, "features"] = sizes.intermediate_size / spec.mlp.intermediate_size
    lacking = {kind for _, kind in shares} - set(config.gates)
    if lacking or not shares:
        raise ConfigError(
            f"gates={config.gates} cannot determine {', '.join(sorted(lacking)) or 'any size'}. "
            "Add the gates for these sizes."
        )
    return shares


def _share_of_dims(model: Any, name: str, spec: AttentionSpec, width: int) -> float:
    """Return the fraction of the head dims whose gates stay open, for a head size of `width`."""
    if not 0 < width <= spec.head_dim or (width % 2 and query_order(spec, _rope(model))):
        raise ConfigError(
            f"{name}: head_dim={width} is out of range (allowed: at most {spec.head_dim}, and even "
            "if the model has rotary positions)."
        )
    return width / spec.head_dim


def _rope(model: Any) -> Any:
    return getattr(model.spec, "rope", None)


def binarize(
    model: Any, config: StructureConfig, costs: Costs, likely: Mapping[tuple[str, str], Tensor]
) -> SelectedUnits:
    """Prune the units with the lowest gate probability until the target is met.

    Raises:
        ConfigError: the target cannot be reached. Every layer keeps at least one unit of each kind,
            and sublayers without gates are never removed.
    """
    shares = open_units(model, config)
    open_now = _order_shared(model, dict(likely))
    if shares:
        chosen: SelectedUnits = {}
        for key, value in open_now.items():
            step = _fewest(key[1], config)
            count = (
                round(shares[key] * len(value)) if key in shares else _expected_open(value, step)
            )
            groups = _groups(model, key)
            chosen[key] = _best_of_each(value, max(groups, count), groups)
        return chosen
    limit = config.keep_ratio * costs.total
    left = {key: set(range(len(value))) for key, value in open_now.items()}
    steps = sorted(_steps(model, open_now, config), key=lambda step: step[0])
    cost = {name: _cost(costs, name, left) for name in costs.blocks}
    for _, key, numbers in steps:
        if sum(cost.values()) <= limit:
            break
        _prune_(left, key, numbers, config, costs)
        for name in (key[0],) if key[0] else costs.blocks:
            cost[name] = _cost(costs, name, left)
    reached = sum(cost.values())
    if reached > limit:
        raise ConfigError(
            f"keep_ratio={config.keep_ratio} cannot be reached with gates={config.gates} "
            f"(allowed: at least {reached / costs.total:.3f} of the {config.target} of the "
            "blocks). Increase keep_ratio, or use more gates."
        )
    return {key: tuple(sorted(numbers)) for key, numbers in left.items()}


def _expected_open(value: Tensor, step: int) -> int:
    """Return the expected number of open gates, rounded to a multiple of `step` of at least one."""
    return max(1, int((value.sum() / step).round())) * step


def _groups(model: Any, key: tuple[str, str]) -> int:
    """Return the number of equal groups of units that must keep the same number of units each.

    Head dims have one group per key-value head; all other units of a layer are one group.
    """
    if key[1] != "dims":
        return 1
    return int(blocks_of(model)[key[0]].spec.attn.num_kv_heads)  # type: ignore[union-attr]


def _best_of_each(value: Tensor, count: int, groups: int) -> tuple[int, ...]:
    """Return the indices of the units in each group that are most probably open."""
    parts, size = value.view(groups, -1), value.numel() // groups
    return tuple(
        number * size + unit
        for number, part in enumerate(parts)
        for unit in _best(part, round(count / groups))
    )


def _steps(
    model: Any, likely: Mapping[tuple[str, str], Tensor], config: StructureConfig
) -> list[tuple[float, tuple[str, str], list[int]]]:
    """Return (mean probability, (block, kind), indices) of each set of units pruned together."""
    steps = []
    for (name, kind), value in likely.items():
        if kind == "dims":
            steps += _dim_steps((name, kind), value, _groups(model, (name, kind)))
            continue
        ordered, index = value.double().sort(stable=True)
        order, values = index.tolist(), ordered.tolist()
        size = _fewest(kind, config)
        remainder = len(order) % size
        borders = [0] * bool(remainder) + list(range(remainder, len(order), size)) + [len(order)]
        for first, last in itertools.pairwise(borders):
            mean = sum(values[first:last]) / (last - first)
            steps.append((mean, (name, kind), order[first:last]))
    return steps


def _dim_steps(
    key: tuple[str, str], value: Tensor, groups: int
) -> list[tuple[float, tuple[str, str], list[int]]]:
    """Return the entries of `_steps` for head dims; each one prunes one unit of every KV head."""
    ordered, index = value.double().view(groups, -1).sort(dim=-1, stable=True)
    size = ordered.shape[1]
    starts = torch.arange(groups)[:, None] * size
    return [
        (float(ordered[:, column].mean()), key, (index + starts)[:, column].tolist())
        for column in range(size)
    ]


def _prune_(
    left: dict[tuple[str, str], set[int]],
    key: tuple[str, str],
    numbers: list[int],
    config: StructureConfig,
    costs: Costs,
) -> None:
    """Remove units from the kept units `left[key]`, unless too few would remain.

    At least one set of heads, features or head dims remains in every layer, and at least one
    attention sublayer in every stack.
    """
    kind = key[1]
    if kind == "dims":
        if len(left[key]) <= len(numbers):
            return
    elif kind in ("heads", "features", "hidden"):
        if len(left[key]) - len(numbers) < _fewest(kind, config):
            return
    elif kind != "mlp" and _attentions_left(left, key, costs) < 1:
        return
    left[key] -= set(numbers)


def _fewest(kind: str, config: StructureConfig) -> int:
    """Return how many units of a kind are pruned together, which is also the minimum to keep."""
    steps = {"heads": config.tensor_parallel}
    return steps.get(kind, config.multiple_of if kind in ("features", "hidden") else 1)


def _attentions_left(
    left: Mapping[tuple[str, str], set[int]], key: tuple[str, str], costs: Costs
) -> int:
    """Return the number of other attention sublayers that remain in the same stack."""
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
    """Return the cost of a block that has only the units in `left`."""
    kinds: dict[str, float] = {
        kind: len(left[name, kind]) for kind in GATE_KINDS if (name, kind) in left
    }
    if ("", "hidden") in left:
        kinds["hidden"] = len(left["", "hidden"]) / costs.width
    return float(costs.of_block(name, kinds))


def _best(value: Tensor, count: int) -> tuple[int, ...]:
    return tuple(sorted(value.argsort(descending=True, stable=True)[:count].tolist()))


def _order_shared(
    model: Any, likely: dict[tuple[str, str], Tensor]
) -> dict[tuple[str, str], Tensor]:
    """Return probabilities in which layers that share a position bias rank heads alike.

    The bias has one column per head. Each layer keeps its number of heads, in the order of the
    common ranking.
    """
    for stack in dict.fromkeys(name.rpartition(".")[0] for name, _ in likely):
        owner = model.get_submodule(stack.rpartition(".")[0])
        stack_keys = [
            key for key in likely if key[1] == "heads" and key[0].rpartition(".")[0] == stack
        ]
        if getattr(owner, "rel_bias", None) is None or not stack_keys:
            continue
        order = (
            torch.stack([likely[key].double() for key in stack_keys]).sum(0).argsort(stable=True)
        )
        for key in stack_keys:
            ranked = likely[key].clone()
            ranked[order] = likely[key].sort().values
            likely[key] = ranked
    return likely


def plan_of_units(model: Any, chosen: SelectedUnits) -> PruningPlan:
    """Return the pruning plan that keeps the chosen units."""
    layers: dict[str, dict[str, Any]] = {}
    gone, blocks = [], blocks_of(model)
    for (name, kind), numbers in chosen.items():
        if kind == "hidden":
            continue
        block = blocks[name]
        parts = layers.setdefault(name, {})
        if kind == "block" and not numbers:
            gone.append(name)
        elif kind in ("attn", "mlp") and not numbers:
            parts[kind] = False
        elif kind == "features":
            parts["features"] = numbers
        elif kind == "heads":
            assert block.spec.attn is not None
            each = heads_per_group(block.spec.attn)
            heads = tuple(group * each + head for group in numbers for head in range(each))
            parts["heads"] = heads
            if block.spec.cross_attn is not None:
                parts["cross_heads"] = heads
        elif kind == "dims":
            assert block.spec.attn is not None
            parts |= _kept_dims(model, block.spec.attn, numbers)
    for name, parts in layers.items():
        _drop_pruned_heads_(blocks[name], parts)
    layer_parts = {
        name: KeptIndices(**_alone(options, blocks[name].spec.cross_attn is not None))
        for name, options in layers.items()
        if name not in gone
    }
    return PruningPlan(layer_parts, tuple(gone), chosen.get(("", "hidden")))


def _kept_dims(model: Any, spec: AttentionSpec, numbers: Sequence[int]) -> dict[str, Any]:
    """Return the kept query and value dims of every key-value head for the chosen units."""
    order = query_order(spec, _rope(model))
    step = 2 if order else 1
    size = spec.head_dim // step
    queries, values = [], []
    for group in range(spec.num_kv_heads):
        units = sorted(n - group * size for n in numbers if n // size == group)
        dims = tuple(unit * step + offset for unit in units for offset in range(step))
        values.append(dims)
        queries.append(tuple(sorted(order[: len(dims)])) if order else dims)
    return {"query_dims": tuple(queries), "value_dims": tuple(values)}


def _drop_pruned_heads_(block: Block, options: dict[str, Any]) -> None:
    """Remove the dims of pruned key-value heads from `options`, in place."""
    spec, heads = block.spec.attn, options.get("heads")
    if spec is None or heads is None or "query_dims" not in options:
        return
    groups = kept_groups(spec, heads)
    for key in ("query_dims", "value_dims"):
        options[key] = tuple(options[key][group] for group in groups)


def _alone(options: dict[str, Any], has_memory: bool) -> dict[str, Any]:
    """Return a layer's options without the sizes of its removed attention or MLP sublayer."""
    lost = set()
    if options.get("attn") is False and "cross_heads" not in options:
        lost |= {"heads"}
    if options.get("attn") is False and not has_memory:
        lost |= {"query_dims", "value_dims"}
    if options.get("mlp") is False:
        lost |= {"features"}
    return {key: value for key, value in options.items() if key not in lost}

"""Builds a pruning plan from requested sizes and importance scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bmforge.compress.prune.importance import Scores
from bmforge.compress.prune.plan import KeptIndices, PruningPlan, blocks_of, heads_per_group
from bmforge.errors import ConfigError
from bmforge.models.resize import kept_dims
from bmforge.models.sizes import Sizes
from bmforge.nn import AttentionSpec, Block, MoESpec
from bmforge.surgery import match_names

__all__ = ["choose_plan", "round_to_unit", "pick_heads", "shared_scores"]


def choose_plan(
    model: Any,
    scores: Scores,
    sizes: Mapping[str, Sizes],
    *,
    gone: Mapping[str, int] | None = None,
    halves: Mapping[str, int] | None = None,
    hidden_size: int = 0,
) -> PruningPlan:
    """Return the plan that keeps the most important units at the requested sizes.

    Args:
        model: bmforge model of any family.
        scores: importance scores of `measure_importance`.
        sizes: dict from a glob of block names to requested sizes; later entries take precedence.
        gone: dict from stack name to the number of blocks to remove, least important first.
        halves: dict from "attn" or "mlp" to the number of blocks per stack that keep it, the most
            important ones.
        hidden_size: new hidden size; 0 keeps the current one.

    Raises:
        ConfigError: sizes are invalid for the model; the message names the nearest valid sizes.
    """
    blocks = blocks_of(model)
    requested: dict[str, dict[str, Any]] = {}
    for glob, size in sizes.items():
        values = {k: v for k, v in vars(size).items() if v is not None}
        for name in match_names(blocks, (glob,), "layer"):
            requested.setdefault(name, {}).update(values)
    lost = [
        name
        for stack, count in (gone or {}).items()
        for name in _least(scores, blocks, stack, count)
    ]
    for half, count in (halves or {}).items():
        for name in _find_removed_sublayers(scores, blocks, half, count, lost):
            requested.setdefault(name, {})[half] = False
    shared = shared_scores(model, blocks, scores)
    layers = {
        name: _keep(model, name, blocks[name], options, scores | shared)
        for name, options in requested.items()
        if name not in lost
    }
    hidden = None
    if hidden_size and hidden_size != model.config.hidden_size:
        if not 0 < hidden_size < model.config.hidden_size:
            raise ConfigError(
                f"hidden_size={hidden_size} must be below {model.config.hidden_size}, the "
                "hidden size of the model."
            )
        hidden = _best(scores["", "hidden"], hidden_size)
    return PruningPlan({n: k for n, k in layers.items() if k != KeptIndices()}, tuple(lost), hidden)


def round_to_unit(target: int, unit: int, most: int) -> int:
    """Return the multiple of `unit` nearest to `target`, between `unit` and `most`."""
    return max(unit, min(most // unit, round(target / unit)) * unit)


def pick_heads(spec: AttentionSpec, scores: Tensor, num_heads: int, num_kv_heads: int) -> list[int]:
    """Return the indices of the query heads to keep, the same number for each of the best KV heads.

    Raises:
        ConfigError: `num_heads` and `num_kv_heads` do not match.
    """
    if num_heads % num_kv_heads or num_heads // num_kv_heads > heads_per_group(spec):
        fit = round_to_unit(num_heads, num_kv_heads, num_kv_heads * heads_per_group(spec))
        raise ConfigError(
            f"num_heads={num_heads} does not match num_kv_heads={num_kv_heads} with at most "
            f"{heads_per_group(spec)} query heads each. The nearest valid value is {fit}."
        )
    each = num_heads // num_kv_heads
    groups = scores.view(spec.num_kv_heads, -1)
    best = groups.topk(each, -1)
    chosen_groups = _best(best.values.sum(-1), num_kv_heads)
    per = heads_per_group(spec)
    return [g * per + h for g in chosen_groups for h in sorted(best.indices[g].tolist())]


def _best(scores: Tensor, count: int) -> tuple[int, ...]:
    """Return the sorted indices of the `count` largest scores; ties select the smaller index."""
    order = scores.double().argsort(descending=True, stable=True)
    return tuple(sorted(order[:count].tolist()))


def _least(scores: Scores, blocks: Mapping[str, Block], stack: str, count: int) -> list[str]:
    names = [name for name in blocks if name.rpartition(".")[0] == stack]
    if not 0 <= count < len(names):
        raise ConfigError(
            f"{count} of the {len(names)} layers of {stack} cannot be removed (allowed: 0 to "
            f"{len(names) - 1}). At least one layer must remain."
        )
    return sorted(names, key=lambda name: float(scores[name, "block"]))[:count]


def _find_removed_sublayers(
    scores: Scores, blocks: Mapping[str, Block], half: str, count: int, lost: list[str]
) -> list[str]:
    """Return the blocks whose "attn" or "mlp" is removed: all but the `count` best per stack."""
    removed = []
    for stack in dict.fromkeys(name.rpartition(".")[0] for name in blocks):
        candidates = [
            name for name in blocks if name.rpartition(".")[0] == stack and name not in lost
        ]
        candidates = [name for name in candidates if getattr(blocks[name], half) is not None]
        if count > len(candidates):
            raise ConfigError(
                f"{half}_layers={count} is more than the {len(candidates)} layers of {stack}. "
                "Use a smaller number."
            )
        removed += sorted(candidates, key=lambda name: float(scores[name, half]))[
            : len(candidates) - count
        ]
    return removed


def shared_scores(model: Any, blocks: Mapping[str, Block], scores: Scores) -> Scores:
    """Return common head scores for layers that share a position bias: sums over the layers."""
    shared: Scores = {}
    for stack in dict.fromkeys(name.rpartition(".")[0] for name in blocks):
        owner = model.get_submodule(stack.rpartition(".")[0])
        if getattr(owner, "rel_bias", None) is None:
            continue
        names = [
            n for n, b in blocks.items() if n.rpartition(".")[0] == stack and b.attn is not None
        ]
        widest = max(len(scores[name, "heads"]) for name in names)
        total = torch.zeros(widest)
        for name in names:
            part = scores[name, "heads"].cpu()
            total[: len(part)] += part / part.sum().clamp(min=1e-30)
        for name in names:
            shared[name, "heads"] = total[: len(scores[name, "heads"])]
    return shared


def _keep(
    model: Any, name: str, block: Block, options: dict[str, Any], scores: Scores
) -> KeptIndices:
    """Return the indices that one layer keeps."""
    parts: dict[str, Any] = {}
    spec = block.spec.attn or block.spec.cross_attn
    if options.get("attn") is False:
        parts["attn"] = False
    if options.get("mlp") is False:
        parts["mlp"] = False
    try:
        if spec is not None and (options.get("attn") is not False or block.spec.cross_attn):
            parts |= _keep_heads(model, name, block, spec, options, scores)
        if block.spec.mlp is not None and options.get("mlp") is not False:
            parts |= _keep_features(name, block, options, scores)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    return KeptIndices(**parts)


def _keep_heads(
    model: Any,
    name: str,
    block: Block,
    spec: AttentionSpec,
    options: dict[str, Any],
    scores: Scores,
) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    groups = options.get("num_kv_heads")
    heads = options.get("num_heads")
    if groups is None:
        groups = (
            (heads or spec.num_heads) if spec.num_kv_heads == spec.num_heads else spec.num_kv_heads
        )
    if heads is None:
        heads = groups * heads_per_group(spec)
    for what, most, have in (
        ("num_heads", spec.num_heads, heads),
        ("num_kv_heads", spec.num_kv_heads, groups),
    ):
        if have > most:
            raise ConfigError(
                f"{what}={have} is more than the layer's {what}={most}. Use at most {most}."
            )
    if (heads, groups) != (spec.num_heads, spec.num_kv_heads):
        for key, part in (("heads", "attn"), ("cross_heads", "cross_attn")):
            own = getattr(block.spec, part)
            if own is not None:
                parts[key] = tuple(pick_heads(own, scores[name, key], heads, groups))
    width = options.get("head_dim") or spec.head_dim
    if width == spec.head_dim:
        return parts
    if width > spec.head_dim:
        raise ConfigError(
            f"head_dim={width} is more than the layer's head_dim={spec.head_dim}. Use at most "
            f"{spec.head_dim}."
        )
    chosen = parts.get("heads") or parts.get("cross_heads") or range(spec.num_heads)
    groups_kept = list(dict.fromkeys(head // heads_per_group(spec) for head in chosen))
    turned = getattr(model.spec, "rope", None)
    parts["query_dims"] = _query_dims(
        block, spec, scores[name, "query_dims"][groups_kept], width, turned
    )
    parts["value_dims"] = tuple(
        _best(row, width) for row in scores[name, "value_dims"][groups_kept]
    )
    return parts


def _query_dims(
    block: Block, spec: AttentionSpec, scores: Tensor, width: int, rope: Any
) -> tuple[tuple[int, ...], ...]:
    """Return the kept q and k dims of every key-value head; rotary pairs are not split."""
    module: Any = block.attn or block.cross_attn
    # All heads share one norm, so they must keep the same dims.
    if getattr(module, "q_norm", None) is not None:
        scores = scores.sum(0, keepdim=True).expand_as(scores)
    turned = 0 if rope is None or block.attn is None else min(rope.rotary_dim, spec.head_dim)
    if width < turned:
        if width % 2:
            raise ConfigError(
                f"head_dim={width} would split a rotary pair. The nearest valid value is "
                f"{width + 1}."
            )
        pairs = sorted(kept_dims(width, spec.head_dim, rope.rotary_dim, spec.rope_interleaved))
        return (tuple(old for _, old in pairs),) * len(scores)
    fixed = tuple(range(turned))
    return tuple(
        fixed + tuple(turned + d for d in _best(row[turned:], width - turned)) for row in scores
    )


def _keep_features(
    name: str, block: Block, options: dict[str, Any], scores: Scores
) -> dict[str, Any]:
    spec = block.spec.mlp
    parts: dict[str, Any] = {}
    assert spec is not None
    features = scores[name, "features"]
    if (count := options.get("num_experts")) is not None:
        if not isinstance(spec, MoESpec):
            raise ConfigError(
                "num_experts has no effect on a dense MLP. Split the MLP into experts with moefy, "
                "or leave num_experts out."
            )
        if count > spec.num_experts:
            raise ConfigError(
                f"num_experts={count} is more than the layer's num_experts={spec.num_experts}. "
                f"Use at most {spec.num_experts}."
            )
        if count < spec.num_experts:
            parts["experts"] = _best(scores[name, "experts"], count)
            features = features[list(parts["experts"])]
    size = options.get("intermediate_size") or spec.intermediate_size
    if size > spec.intermediate_size:
        raise ConfigError(
            f"intermediate_size={size} is more than the layer's "
            f"intermediate_size={spec.intermediate_size}. Use a smaller value."
        )
    if size < spec.intermediate_size:
        if isinstance(spec, MoESpec):
            parts["features"] = tuple(_best(row, size) for row in features)
        else:
            parts["features"] = _best(features, size)
    return parts

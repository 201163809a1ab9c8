"""Pruning plans: indices of the heads, features and blocks to keep, checked, stored as JSON.

A plan contains no weights. Importance scores or gates produce a plan (`make_plan.py`,
`structure.py`), and `shrink_` applies it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn

from bmforge.errors import ConfigError, suggest
from bmforge.nn import Attention, AttentionSpec, Block, MoESpec
from bmforge.nn.position import RopeSpec

__all__ = [
    "KeptIndices",
    "PruningPlan",
    "blocks_of",
    "heads_per_group",
    "kept_groups",
    "query_order",
]


@dataclass(frozen=True)
class KeptIndices:
    """Kept indices of one layer, in their new order; None for all.

    Args:
        heads: query heads of the self-attention, the same number for each kept key-value head.
        cross_heads: query heads of the cross-attention, as many as `heads`.
        query_dims: dims of q and k, one list per kept key-value head, all of equal length;
            of the rotary pairs, the first ones are kept, because a smaller head has only their
            rotary frequencies.
        value_dims: dims of v and of the input of o, one list per kept key-value head, of the
            same lengths as `query_dims`.
        features: MLP features; for experts one list per kept expert.
        experts: experts of an MoE layer.
        attn: whether the self-attention is kept.
        mlp: whether the MLP is kept.
    """

    heads: tuple[int, ...] | None = None
    cross_heads: tuple[int, ...] | None = None
    query_dims: tuple[tuple[int, ...], ...] | None = None
    value_dims: tuple[tuple[int, ...], ...] | None = None
    features: tuple[Any, ...] | None = None
    experts: tuple[int, ...] | None = None
    attn: bool = True
    mlp: bool = True


@dataclass(frozen=True)
class PruningPlan:
    """Pruning plan of a model; layers that are not listed are kept unchanged.

    Args:
        layers: dict from block name to the kept indices of the layer.
        gone: names of removed blocks.
        hidden: kept hidden features; None for all.
    """

    layers: Mapping[str, KeptIndices] = field(default_factory=dict)
    gone: tuple[str, ...] = ()
    hidden: tuple[int, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values; default values are omitted."""
        layers = {
            name: {
                f.name: getattr(part, f.name)
                for f in fields(part)
                if getattr(part, f.name) != f.default
            }
            for name, part in self.layers.items()
        }
        return {"layers": layers, "gone": list(self.gone), "hidden": self.hidden}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PruningPlan:
        """Read a plan from the result of `to_json`.

        Raises:
            ConfigError: a field is unknown.
        """
        field_names = {f.name for f in fields(KeptIndices)}
        layers = {}
        for name, part in dict(value.get("layers") or {}).items():
            if unknown := sorted(set(part) - field_names):
                raise ConfigError(
                    f"the plan of {name} has the unknown field {unknown[0]!r} (supported: "
                    f"{', '.join(sorted(field_names))}).{suggest(unknown[0], field_names)}"
                )
            layers[name] = KeptIndices(**{key: _as_tuples(item) for key, item in part.items()})
        hidden = value.get("hidden")
        return cls(layers, tuple(value.get("gone") or ()), _as_tuples(hidden))

    def check(self, model: nn.Module) -> None:
        """Raise an error if the plan does not fit a model.

        Raises:
            ConfigError: the plan does not fit; the message lists all problems and valid values.
        """
        blocks = blocks_of(model)
        problems = [
            f"{name!r} is not a layer of this model"
            + (f" ({hint.strip()})" if (hint := suggest(name, blocks)) else "")
            for name in (*self.layers, *self.gone)
            if name not in blocks
        ]
        for name, part in self.layers.items():
            if name in blocks:
                problems += [f"{name}: {text}" for text in _problems(blocks[name], part)]
        width = model.config.hidden_size  # type: ignore[union-attr]
        if self.hidden is not None:
            problems += _numbers(self.hidden, width, "features of the hidden states")
        for stack in dict.fromkeys(name.rpartition(".")[0] for name in blocks):
            left = [
                name
                for name, block in blocks.items()
                if name.rpartition(".")[0] == stack
                and name not in self.gone
                and block.attn is not None
                and self.layers.get(name, KeptIndices()).attn
            ]
            if not left:
                problems.append(f"no layer of {stack} would keep its attention")
        if problems:
            raise ConfigError(
                f"the pruning plan is not valid for this model: {'; '.join(problems[:8])}."
            )


def blocks_of(model: nn.Module) -> dict[str, Block]:
    """Return a dict from name to block of a bmforge model.

    Raises:
        ConfigError: the model has no bmforge blocks, or uses latent attention.
    """
    blocks = {name: module for name, module in model.named_modules() if isinstance(module, Block)}
    if not blocks or getattr(model, "spec", None) is None:
        raise ConfigError(
            f"a {type(model).__name__} has no layers of bmforge, so it cannot be pruned "
            "structurally. Load it with bmforge.models.AutoModel."
        )
    if any(block.spec.attn is not None and block.spec.attn.latent for block in blocks.values()):
        raise ConfigError(
            f"a {type(model).__name__} has multi-head latent attention, which structural pruning "
            "does not support. Prune its weights to zeros instead."
        )
    return blocks


def heads_per_group(spec: AttentionSpec) -> int:
    """Return the number of query heads that share a key-value head."""
    return spec.num_heads // spec.num_kv_heads


def query_order(spec: AttentionSpec, rope: RopeSpec | None) -> tuple[int, ...]:
    """Return the dims of a rotary query, pair by pair, starting with the pair to prune last.

    Returns () without a rotary embedding, because the dims may then be pruned in any order.
    """
    turned = 0 if rope is None else min(rope.rotary_dim, spec.head_dim)
    if not turned:
        return ()
    half = turned // 2
    pairs = [(i, i + half) for i in range(half)]
    if spec.rope_interleaved:
        pairs = [(2 * i, 2 * i + 1) for i in range(half)]
    return tuple(dim for pair in pairs for dim in pair) + tuple(range(turned, spec.head_dim))


def kept_groups(spec: AttentionSpec, heads: Sequence[int]) -> tuple[int, ...]:
    """Return the key-value heads used by the given query heads, in order."""
    return tuple(dict.fromkeys(head // heads_per_group(spec) for head in heads))


def _problems(block: Block, part: KeptIndices) -> list[str]:
    problems = []
    for what, name in (("heads", "attn"), ("cross_heads", "cross_attn")):
        heads, attn = getattr(part, what), getattr(block.spec, name)
        if heads is None:
            continue
        if attn is None:
            problems.append(f"{what} has no effect, because the layer has no {name}")
        else:
            problems += _head_problems(attn, heads, what)
    counts = {len(heads) for heads in (part.heads, part.cross_heads) if heads is not None}
    if len(counts) > 1:
        problems.append("heads and cross_heads of a layer must have the same length")
    if part.query_dims is not None or part.value_dims is not None:
        problems += _dim_problems(block, part)
    if (part.features is not None or part.experts is not None) and block.mlp is None:
        problems.append("features and experts have no effect, because the layer has no MLP")
    elif part.features is not None or part.experts is not None:
        problems += _feature_problems(block, part)
    if not part.attn and block.attn is None:
        problems.append("the layer has no attention that could be removed")
    if not part.mlp and block.mlp is None:
        problems.append("the layer has no MLP that could be removed")
    return problems


def _head_problems(spec: AttentionSpec, heads: Sequence[int], what: str) -> list[str]:
    problems = _numbers(heads, spec.num_heads, what)
    if problems:
        return problems
    groups = [head // heads_per_group(spec) for head in heads]
    counts = {group: groups.count(group) for group in groups}
    if len(set(counts.values())) > 1:
        return [
            (
                f"{what} must have the same number of query heads of each key-value head, not "
                f"{', '.join((f'{count} of head {group}' for group, count in counts.items()))}"
            )
        ]
    if groups != [group for group, count in counts.items() for _ in range(count)]:
        return [f"{what} of one key-value head must be consecutive"]
    return []


def _dim_problems(block: Block, part: KeptIndices) -> list[str]:
    spec = block.spec.attn or block.spec.cross_attn
    if spec is None:
        return ["query_dims and value_dims have no effect, because the layer has no attention"]
    if part.query_dims is None or part.value_dims is None:
        return [
            "query_dims and value_dims must be set together, because they have the same head_dim"
        ]
    groups = spec.num_kv_heads
    if part.heads is not None:
        groups = len(kept_groups(spec, part.heads))
    problems = []
    widths = set()
    for what in ("query_dims", "value_dims"):
        lists = getattr(part, what)
        if len(lists) != groups:
            problems.append(
                f"{what} has {len(lists)} lists (expected: one for each of {groups} key-value "
                "heads)"
            )
        for dims in lists:
            widths.add(len(dims))
            problems += _numbers(dims, spec.head_dim, what)
    if len(widths) > 1:
        problems.append(
            "all heads of a layer must have the same number of dims, not "
            f"{' and '.join(map(str, sorted(widths)))}"
        )
    module: Any = block.attn or block.cross_attn
    is_normed = isinstance(module, Attention) and module.q_norm is not None
    if is_normed and len(set(part.query_dims)) > 1:
        problems.append("heads that share a norm must have the same query_dims")
    return problems


def _feature_problems(block: Block, part: KeptIndices) -> list[str]:
    spec = block.spec.mlp
    assert spec is not None
    if not isinstance(spec, MoESpec):
        if part.experts is not None:
            return ["experts has no effect, because the layer has a dense MLP"]
        return _numbers(part.features or (), spec.intermediate_size, "features")
    problems = []
    experts = spec.num_experts
    if part.experts is not None:
        experts = len(part.experts)
        problems += _numbers(part.experts, spec.num_experts, "experts")
    if part.features is not None:
        if len(part.features) != experts:
            problems.append(
                f"features has {len(part.features)} lists (expected: one for each of {experts} "
                "experts)"
            )
        for numbers in part.features:
            problems += _numbers(numbers, spec.intermediate_size, "features")
        if len({len(numbers) for numbers in part.features}) > 1:
            problems.append("all experts of a layer must have the same number of features")
    return problems


def _numbers(numbers: Sequence[int], count: int, what: str) -> list[str]:
    if not numbers:
        return [f"{what} must contain at least one index"]
    if len(set(numbers)) < len(numbers):
        return [f"{what} contains an index twice"]
    if not 0 <= min(numbers) <= max(numbers) < count:
        return [f"{what} must be from 0 to {count - 1}, not from {min(numbers)} to {max(numbers)}"]
    return []


def _as_tuples(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_as_tuples(item) for item in value)
    return value

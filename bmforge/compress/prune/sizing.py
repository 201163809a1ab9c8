"""Builds the config of a pruned model.

The family's own config fields are used for sizes that they can express. All other sizes become
"resize" entries in `config.changes` (see `models.changes`), each with the new sizes of some layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from bmforge.compress.prune.plan import KeptIndices, PruningPlan, blocks_of, kept_groups
from bmforge.errors import ConfigError
from bmforge.models.changes import Change
from bmforge.models.sizes import LayerSizes, Sizes, sizes_of
from bmforge.nn import Block, MoESpec

__all__ = ["ResolvedModel", "unsupported_fields", "config_after_pruning"]

_HEADS = ("num_heads", "num_kv_heads", "head_dim")
_FEED = ("intermediate_size", "num_experts", "experts_per_token")


@dataclass(frozen=True)
class ResolvedModel:
    """Config of a pruned model, and the model on the meta device.

    Args:
        config: config of the smaller model, including "resize" entries.
        model: smaller model, on the meta device.
        sources: dict from the new name of a block to its original name.
    """

    config: Any
    model: Any
    sources: Mapping[str, str]


def config_after_pruning(model: Any, plan: PruningPlan) -> ResolvedModel:
    """Return the config of the model that a plan produces, and the model on the meta device.

    Raises:
        ConfigError: the family cannot express the remaining sizes.
    """
    blocks = blocks_of(model)
    sources = _number_anew(blocks, plan)
    sizes = {
        name: _sizes_left(blocks[old], plan.layers.get(old, KeptIndices()))
        for name, old in sources.items()
    }
    base = _without_blocks(model.config, blocks, plan)
    base = base.replace(changes=())
    if hasattr(base, "mask_modules") and not getattr(base, "folded", False):
        # CPM-Live has a config field for layers without attention or MLP.
        lacking = tuple((not s.attn, not s.intermediate_size) for s in sizes.values())
        base = base.replace(mask_modules=lacking if any(map(any, lacking)) else ())
    best: ResolvedModel | None = None
    tries = [(n, own) for n in ((*_HEADS, *_FEED), _FEED, _HEADS, ()) for own in (False, True)]
    for names, says_own in tries:
        try:
            values = _common_fields(base, sizes.values(), names)
            if plan.hidden is not None:
                values["hidden_size"] = len(plan.hidden)
            config = _with_fields(base, values, says_own)
            config = config.replace(changes=tuple(_changes_to(config, sizes)))
            new = type(model).from_config(config, device="meta", dtype=_dtype_of(model))
        except ConfigError:
            if (names, says_own) != tries[-1] or best is not None:
                continue
            raise
        if getattr(new.spec, "rope", None) != getattr(model.spec, "rope", None):
            continue  # another head size would change the rotary frequencies
        if best is None or len(config.changes) < len(best.config.changes):
            best = ResolvedModel(config, new, sources)
    if best is None:
        raise ConfigError(
            f"the config of a {type(model).__name__} has no field for these sizes, because its "
            "rotary positions depend on head_dim. Keep head_dim."
        )
    for name, source in sources.items():
        _check_block(best.model.get_submodule(name), blocks[source], sizes[name], name)
    return best


def unsupported_fields(config: Any) -> list[str]:
    """Describe the config fields and "resize" entries that transformers cannot load."""
    out = config.to_hf()
    named = set(config.hf_names.values())
    extra = [name for name in ("head_dim", "intermediate_size") if name in out]
    extra = [name for name in extra if name not in named]
    return extra + [f"{change.kind} {', '.join(change.where)}" for change in config.changes]


def _number_anew(blocks: Mapping[str, Block], plan: PruningPlan) -> dict[str, str]:
    """Return a dict from the new name of every kept block to its original name."""
    renamed: dict[str, str] = {}
    counts: dict[str, int] = {}
    for name in blocks:
        stack = name.rpartition(".")[0]
        if name not in plan.gone:
            renamed[f"{stack}.{counts.get(stack, 0)}"] = name
            counts[stack] = counts.get(stack, 0) + 1
    return renamed


def _sizes_left(block: Block, part: KeptIndices) -> LayerSizes:
    sizes = sizes_of(block.spec)
    spec = block.spec.attn or block.spec.cross_attn
    heads = part.heads or part.cross_heads
    if spec is not None and heads is not None:
        groups = len(kept_groups(spec, heads))
        sizes = replace(sizes, num_heads=len(heads), num_kv_heads=groups)
    if part.query_dims is not None:
        sizes = replace(sizes, head_dim=len(part.query_dims[0]))
    if part.experts is not None:
        count = len(part.experts)
        per_token = min(sizes.experts_per_token, count)
        sizes = replace(sizes, num_experts=count, experts_per_token=per_token)
    if part.features is not None:
        has_lists = isinstance(block.spec.mlp, MoESpec)
        width = len(part.features[0]) if has_lists else len(part.features)
        sizes = replace(sizes, intermediate_size=width)
    return sizes.without(not part.attn, not part.mlp)


def _without_blocks(config: Any, blocks: Mapping[str, Block], plan: PruningPlan) -> Any:
    """Return a copy of the config without the removed blocks."""
    if not plan.gone:
        return config
    remaining: dict[str, list[int]] = {}
    for name in blocks:
        stack, _, number = name.rpartition(".")
        remaining.setdefault(stack, [])
        if name not in plan.gone:
            remaining[stack].append(int(number))
    changes: dict[str, Any] = {}
    for stack, numbers in remaining.items():
        has_own = stack.startswith("decoder.") and hasattr(config, "num_decoder_layers")
        key = "num_decoder_layers" if has_own else "num_layers"
        if changes.setdefault(key, len(numbers)) != len(numbers):
            raise ConfigError(
                f"a {type(config).__name__} has one num_layers for all its stacks. Remove the same "
                "number of blocks from each stack (remaining: "
                f"{', '.join((f'{s}: {len(n)}' for s, n in remaining.items()))})."
            )
    numbers = next(iter(remaining.values()))
    for item in fields(config):
        value = getattr(config, item.name)
        if not isinstance(value, (list, tuple)) or item.name == "changes" or not value:
            continue
        if item.name.endswith("_layers") and item.name in _NUMBERED:
            changes[item.name] = type(value)(numbers.index(v) for v in value if v in numbers)
        elif len(value) == config.num_layers:
            changes[item.name] = type(value)(value[number] for number in numbers)
    if getattr(config, "sparse_step", 1) != 1:  # renumbering would shift the MoE layers
        step, dense = config.sparse_step, config.dense_layers
        lacking = [n for n in numbers if n in dense or (n + 1) % step]
        changes |= {"sparse_step": 1, "dense_layers": [numbers.index(n) for n in lacking]}
    if hasattr(config, "num_dense"):  # the first layers have no experts
        changes["num_dense"] = sum(number < config.num_dense for number in numbers)
    if hasattr(config, "depth_scale"):  # keep depth_scale / sqrt(num_layers)
        changes["depth_scale"] = config.depth_scale * (len(numbers) / config.num_layers) ** 0.5
    return config.replace(**changes)


# Config fields that hold layer indices.
_NUMBERED = ("window_layers", "dense_layers")


def _with_fields(config: Any, values: Mapping[str, Any], says_own: bool) -> Any:
    """Return a copy of the config with changed fields.

    With `says_own`, sizes that published configs derive from other fields are set explicitly.
    """
    own = {
        name: values.get(name, getattr(config, name))
        for name in ("head_dim", "intermediate_size")
        if name not in config.hf_names and (says_own or config.states_size(name))
    }
    return config.replace(**values, raw={**config.raw, **own})


def _common_fields(
    config: Any, sizes: Iterable[LayerSizes], names: Sequence[str]
) -> dict[str, Any]:
    """Return the config fields whose value is the same in all layers."""
    layers, common = list(sizes), {}
    with_heads = [layer for layer in layers if layer.num_attentions]
    with_mlp = [layer for layer in layers if layer.intermediate_size]
    dense = [layer for layer in with_mlp if not layer.num_experts]
    sparse = [layer for layer in with_mlp if layer.num_experts]
    groups: list[tuple[str, str, list[LayerSizes]]] = [(n, n, with_heads) for n in _HEADS]
    groups.append(("intermediate_size", "intermediate_size", dense))
    if sparse:
        own = "expert_size" if hasattr(config, "expert_size") else "intermediate_size"
        groups.append((own, "intermediate_size", sparse))
        groups += [(n, n, sparse) for n in ("num_experts", "experts_per_token")]
    for key, name, members in groups:
        values = {getattr(layer, name) for layer in members}
        if name in names and hasattr(config, key) and len(values) == 1:
            common[key] = values.pop()
    width, shared = common.get("expert_size"), {layer.shared_size for layer in sparse}
    if width and hasattr(config, "num_shared") and len(shared) == 1:
        # The shared experts together keep their width, if it is a multiple of the new one.
        common["num_shared"] = shared.pop() // width
    return common


def _changes_to(config: Any, wanted_sizes: Mapping[str, LayerSizes]) -> list[Change]:
    """Return the "resize" entries that give the config's layers the wanted sizes."""
    own = config.own_sizes()
    layers = {f"{stack}.{n}": size for stack, sizes in own.items() for n, size in enumerate(sizes)}
    groups: dict[tuple[tuple[str, Any], ...], list[str]] = {}
    for name, want in wanted_sizes.items():
        if name not in layers:
            raise ConfigError(f"{type(config).__name__} has no layer {name!r}.")
        if options := _options_to(layers[name], want):
            groups.setdefault(tuple(options.items()), []).append(name)
    return [Change("resize", tuple(names), dict(options)) for options, names in groups.items()]


def _options_to(have: LayerSizes, want: LayerSizes) -> dict[str, Any]:
    """Return the options of a "resize" entry between two layer sizes; {} if they are equal."""
    options: dict[str, Any] = {}
    if have.attn and not want.attn:
        options["attn"] = False
    if have.intermediate_size and not want.intermediate_size:
        options["mlp"] = False
    heads = _HEADS if want.num_attentions else ()
    feed = _FEED if want.intermediate_size else ()
    options |= {
        name: getattr(want, name)
        for name in (*heads, *feed)
        if getattr(want, name) != getattr(have, name)
    }
    if (have.resized(Sizes(**options)) if options else have) != want:
        raise ConfigError(
            f"a layer with the sizes {have} cannot be resized to {want}. Use sizes that are not "
            "larger than those of the layer."
        )
    return options


def _check_block(new: Block, old: Block, want: LayerSizes, name: str) -> None:
    """Raise an error if a new block differs from its original in more than its sizes."""
    spec = old.spec
    if spec.attn is not None and new.spec.attn is not None:
        spec = replace(spec, attn=_with_sizes_of(new.spec.attn, spec.attn))
    if spec.cross_attn is not None and new.spec.cross_attn is not None:
        spec = replace(spec, cross_attn=_with_sizes_of(new.spec.cross_attn, spec.cross_attn))
    if new.spec.mlp is not None and spec.mlp is not None:
        spec = replace(spec, mlp=_with_sizes_of(new.spec.mlp, spec.mlp))
    lost = {key: None for key in ("attn", "mlp") if getattr(new.spec, key) is None}
    expected = replace(
        spec,
        hidden_size=new.spec.hidden_size,
        residual_scale=new.spec.residual_scale,
        **lost,  # type: ignore[arg-type]
    )
    if expected != new.spec or sizes_of(new.spec) != want:
        raise ConfigError(
            f"{name} would become another type of layer, because removing a layer lowers the index "
            "of the following layers, and in this family the index determines the type. Remove "
            "the attention and the MLP of the layer instead, which keeps the index."
        )


def _with_sizes_of(new: Any, old: Any) -> Any:
    """Return a copy of a block's old spec with the sizes and scales of its new spec."""
    names = (*_HEADS, *_FEED, "in_scale", "out_scale")
    field_names = {item.name for item in dataclasses.fields(old)}
    return replace(old, **{name: getattr(new, name) for name in names if name in field_names})


def _dtype_of(model: Any) -> torch.dtype:
    return next(p.dtype for p in model.parameters() if p.is_floating_point())

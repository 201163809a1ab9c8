"""Merges adapters into the base weights, and unmerges them bit for bit, in any order.

A merged weight is always computed from the base weight and all merged adapters, in the order in
which they apply, never from an earlier merged weight. If merging or unmerging would change the
outputs of adapters that stay attached, an error is raised and nothing is changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.nn.bottleneck import Bottleneck
from bmforge.nn.channel import BiasAdapter, ScaleAdapter
from bmforge.nn.low_rank import EmbeddingLowRank, ExpertsLowRank, LowRank
from bmforge.nn.part import adapters_of, detach_part_
from bmforge.nn.token_rows import TokenRows
from bmforge.provenance import Provenance, ProvenanceSource, warn_of_licenses
from bmforge.shards import is_streamed, is_torchao, whole_tensor
from bmforge.surgery import shared_tensors
from bmforge.tune.delta.attached import (
    AttachedModule,
    base_weights_of,
    deltas_of,
    find_delta,
    is_parallelized,
    whole_model,
)
from bmforge.tune.delta.base import AttachedDelta
from bmforge.tune.delta.merged_weights import (
    dequantized_weight,
    full_precision,
    get_parameter,
    last_projection,
    write_local_,
)

__all__ = ["check_attached", "merge_", "merge_deltas", "unmerge_", "unmerge_deltas"]

# Module name -> name of a parameter that merging changes -> value of the parameter.
Values = dict[str, dict[str, Tensor]]


def merge_deltas(
    model: nn.Module, names: Sequence[str] | None = None, dequantize: bool = False
) -> None:
    """Merge several adapters at once, as DoRA and IA3 require on layers with further adapters.

    Args:
        model: model with adapters.
        names: names of the adapters to merge (default: all attached adapters).
        dequantize: True to dequantize torchao's quantized weights first.

    Raises:
        ConfigError: same as in `Delta.merge`.
    """
    if names is None:
        names = [n for n, d in deltas_of(model).items() if d.is_attached() and not d.merged]
    merge_(model, [find_delta(model, name) for name in names], dequantize)


def unmerge_deltas(model: nn.Module, names: Sequence[str] | None = None) -> None:
    """Unmerge several adapters at once.

    Args:
        model: model with merged adapters.
        names: names of the adapters to unmerge (default: all merged adapters).

    Raises:
        ConfigError: same as in `Delta.unmerge`.
    """
    if names is None:
        names = [name for name, delta in deltas_of(model).items() if delta.merged]
    unmerge_(model, [find_delta(model, name) for name in names])


def merge_(model: nn.Module, deltas: Sequence[AttachedDelta], dequantize: bool = False) -> None:
    """Merge adapters into the base weights; see `Delta.merge`."""
    for delta in deltas:
        if delta.merged:
            raise ConfigError(f"adapter {delta.name!r} is already merged. Unmerge it first.")
        if not delta.is_attached():
            raise ConfigError(f"adapter {delta.name!r} is detached. Call attach() before merging.")
    base, laid_out = base_weights_of(model), is_parallelized(model)
    merged = [d for d in deltas_of(model).values() if d.merged]
    targets = _targets(model, deltas)
    for target in targets:
        _check_exact(model, target, merged)
        _check_exact(model, target, [*merged, *deltas])
    plain = {t: w for t in targets if (w := dequantized_weight(model, t, dequantize)) is not None}
    _check_weights(model, targets, deltas)
    active = deltas if laid_out else [*merged, *deltas]
    new = {t: _merged_values(model, t, active, plain.get(t)) for t in targets}
    for target, weight in plain.items():
        module: Any = model.get_submodule(target)
        base[f"{target}.weight"] = module.weight
        module.weight = nn.Parameter(weight, requires_grad=False)
    # All original values are copied before the first write, because targets may share a weight.
    for target, values in new.items() if not laid_out else ():
        for key in values:
            original = get_parameter(model, target, key).detach().clone()
            base.setdefault(f"{target}.{key}", original)
    for target, values in new.items():
        for key, value in values.items():
            write_local_(get_parameter(model, target, key), value)
    for delta in deltas:
        _remove_modules_(delta)
        _join_licenses_(delta)
        delta.merged = True


def unmerge_(model: nn.Module, deltas: Sequence[AttachedDelta]) -> None:
    """Undo `merge_` for some of the merged adapters."""
    for delta in deltas:
        if not delta.merged:
            raise ConfigError(f"adapter {delta.name!r} is not merged, so it cannot be unmerged.")
    if is_parallelized(model):
        raise ConfigError("a parallelized model cannot be unmerged. Load the base model again.")
    base = base_weights_of(model)
    merged = [d for d in deltas_of(model).values() if d.merged]
    left = [d for d in merged if d not in deltas]
    targets = _targets(model, deltas)
    for target in targets:
        _check_exact(model, target, merged)
        _check_exact(model, target, left)
    new = {t: _merged_values(model, t, left, None) for t in targets}
    for target, chain in targets.items():
        for key in _keys(model, target, chain):
            name = f"{target}.{key}"
            if key in new[target]:
                write_local_(get_parameter(model, target, key), new[target][key])
            elif isinstance(original := base.pop(name), nn.Parameter):
                setattr(model.get_submodule(target), key, original)
            else:
                write_local_(get_parameter(model, target, key), original)
    for delta in deltas:  # all, before `attach` compares an adapter with those still merged
        delta.merged = False
    for delta in deltas:
        delta.attach()


def check_attached(model: nn.Module, delta: AttachedDelta) -> None:
    """Raise `ConfigError` if a newly attached adapter cannot be combined with the merged ones."""
    merged = [d for d in deltas_of(model).values() if d.merged]
    for target in _targets(model, merged):
        _check_exact(model, target, merged)


class _Link(NamedTuple):
    """One adapter module in the sequence of those that transform a layer's output."""

    delta: AttachedDelta | None
    owner: str
    part: Any


def _targets(model: nn.Module, deltas: Iterable[AttachedDelta]) -> dict[str, list[_Link]]:
    """Return a dict from the name of each module to merge into, to its adapter modules."""
    targets: dict[str, list[_Link]] = {}
    for delta in deltas:
        for attached in delta.here():
            target = _target(model, attached)
            if target is None:
                _refuse_part(delta, attached.part)
            targets.setdefault(target, []).append(_Link(delta, attached.owner, attached.part))  # type: ignore[arg-type]
    return targets


def _target(model: nn.Module, attached: AttachedModule) -> str | None:
    """Return the name of the base module into whose weights an adapter module can be merged."""
    if isinstance(attached.part, (LowRank, ExpertsLowRank, ScaleAdapter, TokenRows)):
        return attached.owner
    if isinstance(attached.part, BiasAdapter):
        last = last_projection(model.get_submodule(attached.owner))
        return attached.owner if last is None else f"{attached.owner}.{last}"
    return None


def _refuse_part(delta: AttachedDelta, part: Any) -> None:
    why = "has an activation" if isinstance(part, Bottleneck) else "is not a matrix product"
    raise ConfigError(
        f"a {type(delta).__name__} {why}, so it cannot be merged into weights. Save the adapter "
        "next to the model instead."
    )


def _chain(model: nn.Module, target: str) -> list[_Link]:
    """Return all adapter modules that act on a layer's output, in the order in which they apply.

    Adapters on the layer itself come first, then, if the layer is the output projection of an
    attention or MLP, those on that module. In both groups, adapters that belong to no `Delta` come
    first, then the others in order of attachment.
    """
    owners = [target]
    around = target.rpartition(".")[0]
    if around and last_projection(model.get_submodule(around)) == target.rpartition(".")[2]:
        owners.append(around)
    links = []
    for owner in owners:
        delta_links = [
            _Link(delta, owner, entry.part)
            for delta in deltas_of(model).values()
            for entry in delta.held
            if entry.owner == owner and (delta.merged or delta.is_attached())
        ]
        parts = {id(link.part) for link in delta_links}
        attached = (part for _, part in adapters_of(model.get_submodule(owner)))
        links += [_Link(None, owner, part) for part in attached if id(part) not in parts]
        links += delta_links
    return links


def _is_additive(part: Any) -> bool:
    """Return True if the module only adds a term that is independent of the layer's output."""
    if isinstance(part, LowRank):
        return part.magnitude is None
    if isinstance(part, Bottleneck):
        return part.options.reads != "out" or part.reader[0] is not None
    return isinstance(part, (BiasAdapter, ExpertsLowRank))


def _check_exact(model: nn.Module, target: str, merged: Sequence[AttachedDelta]) -> None:
    """Raise `ConfigError` if merging would change the joint result of the adapters.

    Adapters that only add to the output can be merged in any order. Others must be the first of the
    chain: DoRA uses the norms of the base's rows, and a factor on the input affects all adapters.
    """
    chain = _chain(model, target)
    inside = [any(link.delta is delta for delta in merged) for link in chain]
    if all(inside) or not any(inside) or all(_is_additive(link.part) for link in chain):
        return
    first, later = chain[: sum(inside)], chain[sum(inside) :]
    scales_input = any(isinstance(link.part, ScaleAdapter) and link.part.on_input for link in first)
    takes_norms = any(getattr(link.part, "magnitude", None) is not None for link in later)
    if all(inside[: len(first)]) and not scales_input and not takes_norms:
        return
    names = [delta.name for delta in merged]
    others = {n for link, i in zip(chain, inside, strict=True) if not i and (n := _name(link))}
    raise ConfigError(
        f"adapters {', '.join(map(repr, names))} cannot be merged at {target} while "
        f"{', '.join(map(repr, sorted(others)))} is attached to the same module. Merge or unmerge "
        "all of them together (merge_deltas, unmerge_deltas), or detach one."
    )


def _name(link: _Link) -> str:
    return type(link.part).__name__ if link.delta is None else link.delta.name


def _keys(model: nn.Module, target: str, chain: Iterable[_Link]) -> list[str]:
    """Return the names of a module's parameters that adapter modules change."""
    module = model.get_submodule(target)
    keys: dict[str, None] = {}
    for link in chain:
        part = link.part
        if isinstance(part, ExpertsLowRank):
            keys.update(dict.fromkeys(part.keys))
            continue
        if not isinstance(part, BiasAdapter):
            keys["weight"] = None
        has_bias = isinstance(getattr(module, "bias", None), Tensor)
        needs = isinstance(part, BiasAdapter) or getattr(part, "bias", None) is not None
        if needs and not has_bias:
            raise ConfigError(
                f"{target}, a {type(module).__name__}, has no bias to merge into. Save "
                "the adapter next to the model, or exclude layers without bias."
            )
        if has_bias and (needs or not _is_additive(part)):
            keys["bias"] = None
    return list(keys)


def _merged_values(
    model: nn.Module, target: str, merged: Sequence[AttachedDelta], plain: Tensor | None
) -> dict[str, Tensor]:
    """Return a dict from name to merged value of a module's parameters; {} without adapters."""
    chain = [
        link for link in _chain(model, target) if any(link.delta is applied for applied in merged)
    ]
    base = base_weights_of(model)

    def original(key: str) -> Tensor:
        value = base.get(f"{target}.{key}")
        if key == "weight" and plain is not None:
            return full_precision(plain)
        if value is not None and is_torchao(value):
            value = value.dequantize()
        return full_precision(get_parameter(model, target, key) if value is None else value)

    values = {key: original(key) for key in _keys(model, target, chain)}
    before = dict(values)
    # Factors on the input are applied last, because all adapters of the layer see the scaled input.
    for link in sorted(
        chain, key=lambda applied: isinstance(applied.part, ScaleAdapter) and applied.part.on_input
    ):
        part, weight = link.part, float(link.part.adapter_weight)
        if isinstance(part, ExpertsLowRank):
            for key in part.keys:
                up, down = (
                    full_precision(getattr(part, f"{key}_{side}")) for side in ("up", "down")
                )
                values[key] = values[key] + part.scale * weight * (up @ down)
        elif isinstance(part, LowRank):
            _apply_low_rank(part, weight, values, before, model.get_submodule(target))
        elif isinstance(part, TokenRows):
            rows = values["weight"][list(part.indices)]
            rows = rows + weight * (full_precision(part.weight) - rows)
            values["weight"] = values["weight"].index_copy(0, torch.tensor(part.indices), rows)
        elif isinstance(part, BiasAdapter):
            values["bias"] = values["bias"] + weight * whole_tensor(part.bias)
        else:
            _apply_gain(part, weight, values, model.get_submodule(target))
    return values


def _apply_low_rank(
    part: LowRank, weight: float, values: dict[str, Tensor], base: dict[str, Tensor], module: Any
) -> None:
    """Add a LoRA update to the weight in `values`; for DoRA, compute the new weight."""
    up, down = full_precision(part.up), full_precision(part.down)
    turned = isinstance(part, EmbeddingLowRank) or not hasattr(module, "out_features")
    added = part.scale * (up @ down)
    added = added.t() if turned else added
    if part.magnitude is None:
        values["weight"] = values["weight"] + weight * added
        if part.bias is not None:
            values["bias"] = values["bias"] + part.scale * weight * whole_tensor(part.bias)
        return
    norms = torch.linalg.vector_norm(base["weight"] + added, dim=0 if turned else 1)
    factor = full_precision(part.magnitude) / norms
    changed = (values["weight"] + added) * (factor if turned else factor[:, None])
    values["weight"] = values["weight"] + weight * (changed - values["weight"])
    if "bias" in values:
        changed = factor * (values["bias"] - base["bias"]) + base["bias"]
        values["bias"] = values["bias"] + weight * (changed - values["bias"])


def _apply_gain(part: ScaleAdapter, weight: float, values: dict[str, Tensor], module: Any) -> None:
    factor = 1 + weight * (full_precision(part.weight) - 1)
    is_plain = hasattr(module, "out_features")  # (out, in); transformers' Conv1D is (in, out)
    by_row = part.on_input != is_plain
    values["weight"] = values["weight"] * (factor[:, None] if by_row else factor)
    if "bias" in values and not part.on_input:
        values["bias"] = values["bias"] * factor


def _check_weights(
    model: nn.Module, targets: dict[str, list[_Link]], deltas: Sequence[AttachedDelta]
) -> None:
    """Raise `ConfigError` for weights that are shared between modules, or are not in memory."""
    shared = shared_tensors(model)
    for target, chain in targets.items():
        for key in _keys(model, target, chain):
            tensor = get_parameter(model, target, key)
            # Trained token rows are attached to every layer that shares the weight.
            is_whole = all(isinstance(link.part, TokenRows) for link in chain)
            if id(tensor) in shared and not is_whole:
                raise ConfigError(
                    f"{target}.{key} is tied to another weight, which merging would change too. "
                    "Load the model with tie_word_embeddings=False before you attach "
                    f"{deltas[0].name!r}."
                )
            if is_streamed(tensor):
                raise ConfigError(
                    f"{target}.{key} is streamed. Merge the adapter before streaming."
                )


def _join_licenses_(delta: AttachedDelta) -> None:
    """Add the provenance and licenses of a merged adapter to the model's."""
    model: Any = delta.model
    base, source = getattr(model, "provenance", None), delta.provenance
    if base is None or not source:
        return
    own = [ProvenanceSource("base", type(model).__name__, base.license)] if base.license else []
    if any(part.kind == "base" and part.license == base.license for part in source.parts):
        own = []  # the adapter's provenance lists the base already
    more = source.as_parts("delta", delta.name) if source.license else source.parts
    model.provenance = Provenance("", (*own, *base.parts)).joined(more)
    where = f"{type(model).__name__} with its adapter merged"
    warn_of_licenses(where, model.provenance, base, source)


def _remove_modules_(delta: AttachedDelta) -> None:
    """Remove the adapter modules, also from a parallelized model (`detach` keeps them there)."""
    if not is_parallelized(delta.model):
        delta.detach()
        return
    described: Any = whole_model(delta.model)
    for model in (delta.model, described) if described is not delta.model else (delta.model,):
        module_names = {name for name, _ in model.named_modules()}
        for owner, slot, _ in delta.held:
            if owner in module_names:
                detach_part_(model.get_submodule(owner), slot)
    delta.record_(False)
    described.config = delta.model.config

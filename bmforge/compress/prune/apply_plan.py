"""Applies a pruning plan: removes heads, features, sublayers, blocks and hidden features.

The result is a model of the same family. Its config stores the new sizes in the family's own fields
if they suffice, and otherwise in "resize" entries of `config.changes` (see `models.changes`).
The model can therefore be saved, loaded, parallelized, streamed and served like any other model.

Source: the prunable sizes are BMCook's (`dim_ff`, `num_heads`, `dim_head`, `dim_model`, attention
or MLP, layers); BMCook wrote pruned weights to a file that no model class could load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bmforge.compress.prune.plan import KeptIndices, PruningPlan, blocks_of
from bmforge.compress.prune.sizing import ResolvedModel, config_after_pruning, unsupported_fields
from bmforge.compress.prune.slice_tensors import (
    Picks,
    fold_block,
    kept_indices_of_block,
    take_slices,
)
from bmforge.errors import ConfigError
from bmforge.models.changes import changed_modules
from bmforge.surgery import persistent_tensors

__all__ = ["Shrunk", "apply_plan_", "check_plan"]


@dataclass(frozen=True)
class Shrunk:
    """Result of structured pruning.

    Args:
        plan: plan that was applied.
        parameters_before: number of parameters before pruning; tied parameters count once.
        parameters_after: number of parameters after pruning; tied parameters count once.
        opens_elsewhere: whether the family's classes in transformers can load the model.
        reason: reason why these classes cannot load it; "" if they can.
    """

    plan: PruningPlan
    parameters_before: int
    parameters_after: int
    opens_elsewhere: bool
    reason: str = ""

    def __str__(self) -> str:
        """Return a one-line summary."""
        share = self.parameters_after / self.parameters_before
        text = (
            f"{self.parameters_before:,} parameters became {self.parameters_after:,} ({share:.1%})"
        )
        where = (
            "transformers can load it"
            if self.opens_elsewhere
            else f"only bmforge can load it: {self.reason}"
        )
        return f"{text}; {where}"


@torch.no_grad()
def apply_plan_(model: Any, plan: PruningPlan, *, uniform: bool = False) -> Shrunk:
    """Apply a pruning plan in place; the model may be on the meta device.

    The result computes the same as the full model in which all removed heads, features and blocks
    contribute zero. (Removed hidden features are zero, and norms divide by the number of kept
    features.)

    Args:
        model: bmforge model of any family, not parallelized yet.
        plan: pruning plan.
        uniform: raise an error for sizes that only bmforge can load.

    Raises:
        ConfigError: the plan does not fit the model, or the model is quantized, parallelized or has
            other changes such as adapters. The model is then unchanged.
    """
    plan, settled, reason = check_plan(model, plan, uniform=uniform)
    before = _count(model)
    values = _collect(model, settled, plan)
    flags = {name: p.requires_grad for name, p in model.named_parameters(remove_duplicate=False)}
    _fill_(settled, values, flags)
    settled.model.train(model.training)
    for name in [name for name in model.__dict__ if name not in settled.model.__dict__]:
        del model.__dict__[name]
    model.__dict__.update(settled.model.__dict__)
    return Shrunk(plan, before, _count(model), not reason, reason)


def check_plan(
    model: Any, plan: PruningPlan, *, uniform: bool = False
) -> tuple[PruningPlan, ResolvedModel, str]:
    """Validate a pruning plan, and build the smaller model on the meta device.

    Returns the final plan, the smaller model, and the reason why transformers cannot load it ("" if
    it can).

    Args:
        model: bmforge model of any family, not parallelized yet.
        plan: pruning plan.
        uniform: raise an error for sizes that only bmforge can load.

    Raises:
        ConfigError: see `apply_plan_`.
    """
    plan.check(model)
    _check_plain(model, plan)
    plan = _order_shared_heads(model, plan)
    settled = config_after_pruning(model, plan)
    reason = "; ".join(unsupported_fields(settled.config))
    if uniform and reason:
        raise ConfigError(
            "uniform=True is not possible, because transformers' config has no fields for "
            f"{reason}. Use the same sizes for all layers, or leave uniform out."
        )
    return plan, settled, reason


def _count(model: nn.Module) -> int:
    return sum(tensor.numel() for tensor in persistent_tensors(model).values())


def _check_plain(model: Any, plan: PruningPlan) -> None:
    tensors = persistent_tensors(model).values()
    if any(isinstance(tensor, DTensor) for tensor in tensors):
        raise ConfigError(
            f"{type(model).__name__} is already parallelized. Prune the model before parallelize()."
        )
    others = [change.kind for change in model.config.changes if change.kind != "resize"]
    others += [type(module).__name__ for module in changed_modules(model).values()]
    if any(change.options.get("split") for change in model.config.changes):
        others.append("MLPs split into experts")
    if others:
        raise ConfigError(
            f"{type(model).__name__} already has changes ({', '.join(dict.fromkeys(others))}). "
            "Apply the methods in this order: structured pruning, MoEfication, sparsity, "
            "quantization, adapters."
        )
    if plan.hidden is not None and model.fixed_width:
        raise ConfigError(
            f"the hidden size of a {type(model).__name__} cannot be pruned: {model.fixed_width}. "
            "Leave hidden_size out of the plan."
        )


def _order_shared_heads(model: Any, plan: PruningPlan) -> PruningPlan:
    """Return a plan with a consistent order of kept heads in layers that share a position bias.

    The bias has a column per head, and a layer with fewer heads uses the first columns. The heads
    that a layer keeps must therefore be a subset of the heads of every layer that keeps more.
    """
    layers = dict(plan.layers)
    for stack, table in _shared_biases(model).items():
        stack_blocks = {n: b for n, b in blocks_of(model).items() if n.rpartition(".")[0] == stack}
        stack_blocks = {
            n: b for n, b in stack_blocks.items() if n not in plan.gone and b.attn is not None
        }
        stack_blocks = {n: b for n, b in stack_blocks.items() if layers.get(n, KeptIndices()).attn}
        every = tuple(range(table.shape[1]))
        sets = {
            n: tuple(layers.get(n, KeptIndices()).heads or every[: _heads(b)])
            for n, b in stack_blocks.items()
        }
        order: list[int] = []
        for heads in sorted(sets.values(), key=len):
            order += [head for head in heads if head not in order]
            if set(order) != set(heads):
                raise ConfigError(
                    f"the layers of {stack} share a position bias with one column per head, so the "
                    "heads of a layer with fewer heads must be a subset of the heads of each "
                    "layer with more heads. Choose the heads accordingly."
                )
        for name, heads in sets.items():
            if (name in layers and layers[name].heads is not None) or list(heads) != order[
                : len(heads)
            ]:
                part = layers.get(name, KeptIndices())
                layers[name] = _with_heads(part, tuple(order[: len(heads)]))
    return PruningPlan(layers, plan.gone, plan.hidden)


def _with_heads(part: KeptIndices, heads: tuple[int, ...]) -> KeptIndices:
    """Return a layer's kept indices, with heads and per-head lists in the order of `heads`."""
    old = part.heads or tuple(sorted(heads))
    places = [old.index(head) for head in heads]
    changes: dict[str, Any] = {"heads": heads}
    # Self- and cross-attention share the lists of dims; there is one list per head.
    for key in ("query_dims", "value_dims", "cross_heads"):
        lists = getattr(part, key)
        if lists is not None and part.query_dims is not None:
            changes[key] = tuple(lists[index] for index in places)
    return KeptIndices(**{**{f: getattr(part, f) for f in part.__dataclass_fields__}, **changes})


def _heads(block: Any) -> int:
    return int(block.spec.attn.num_heads)


def _shared_biases(model: Any) -> dict[str, Tensor]:
    """Return a dict from stack name to the stack's shared position bias, (..., heads)."""
    tables = {}
    for stack in dict.fromkeys(name.rpartition(".")[0] for name in blocks_of(model)):
        owner = model.get_submodule(stack.rpartition(".")[0])
        table = getattr(owner, "rel_bias", None)
        if table is not None:
            tables[stack] = table.weight
    return tables


def _collect(model: Any, settled: ResolvedModel, plan: PruningPlan) -> dict[str, Tensor]:
    """Return a dict from new tensor names to the tensors of the smaller model."""
    picks = _kept_bias_columns(model, settled, plan)
    wide = {} if plan.hidden is None else hidden_dims(model, len(plan.hidden))
    stay = None if plan.hidden is None else torch.tensor(plan.hidden)
    old_blocks, old = blocks_of(model), persistent_tensors(model)
    values = {}
    for name in persistent_tensors(settled.model):
        block, key = _split_name(name, settled.sources)
        source = name if block is None else f"{settled.sources[block]}.{key}"
        own_picks: Picks = list(picks.get(source, []))
        if block is not None:
            part = plan.layers.get(settled.sources[block], KeptIndices())
            own_picks += kept_indices_of_block(old_blocks[settled.sources[block]], part).get(
                key, []
            )
        if stay is not None:
            own_picks += [(dim, stay) for dim in wide[source]]
        value = take_slices(old[source], own_picks)
        factor, offset = 1.0, 0.0
        if block is not None:
            was, now = old_blocks[settled.sources[block]], settled.model.get_submodule(block)
            has_norm = getattr(was.attn, "q_norm", None) is not None
            factor = fold_block(was.spec, now.spec, key, has_norm)
        else:
            factor = _compensating_factor(model, settled.model, name)
            owner = settled.model.get_submodule(name.rpartition(".")[0])
            offset = getattr(owner, "offset", 0.0)  # a norm multiplies by weight + offset
        values[name] = value if factor == 1.0 else (value + offset) * factor - offset
    return values


def _split_name(name: str, blocks: Mapping[str, str]) -> tuple[str | None, str]:
    """Split a tensor name into the name of its block (or None) and the rest."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        if (block := ".".join(parts[:count])) in blocks:
            return block, ".".join(parts[count:])
    return None, name


def _kept_bias_columns(model: Any, settled: ResolvedModel, plan: PruningPlan) -> dict[str, Picks]:
    """Return a dict from the name of each shared position bias to the columns to keep."""
    picks: dict[str, Picks] = {}
    for stack, table in _shared_biases(model).items():
        heads: list[int] = []
        for name, part in plan.layers.items():
            if name.rpartition(".")[0] == stack and part.heads is not None and part.attn:
                heads += [head for head in part.heads if head not in heads]
        owner = stack.rpartition(".")[0]
        name = f"{owner}.rel_bias.weight" if owner else "rel_bias.weight"
        order = heads + [head for head in range(table.shape[1]) if head not in heads]
        left = settled.model.get_parameter(name).shape[1]
        if order[:left] != list(range(table.shape[1])):
            picks[name] = [(1, torch.tensor(order[:left]))]
    return picks


def hidden_dims(model: Any, count: int) -> dict[str, list[int]]:
    """Return a dict from tensor name to the dims that depend on the hidden size.

    The dims are found by comparing the shapes with those of a copy on the meta device that has a
    different hidden size.

    Args:
        model: bmforge model of any family.
        count: hidden size of the copy, different from the current one.
    """
    only = config_after_pruning(model, PruningPlan(hidden=tuple(range(count)))).model
    tried = persistent_tensors(only)
    return {
        name: [
            dim
            for dim, (a, b) in enumerate(zip(tensor.shape, tried[name].shape, strict=True))
            if a != b
        ]
        for name, tensor in persistent_tensors(model).items()
    }


def _compensating_factor(old: Any, new: Any, name: str) -> float:
    """Return the factor on an embedding or the final norm that compensates for changed scales.

    In some families the scales of embeddings and logits depend on the hidden size.
    """
    scales = [
        (getattr(m.spec, "embed_scale", 1.0), getattr(m.spec, "head_scale", 1.0))
        for m in (old, new)
    ]
    (embed_old, head_old), (embed_new, head_new) = scales
    embed, head = embed_old / embed_new, head_old / head_new
    if name.split(".")[0] in ("embed", "embed_prompt", "embed_segments"):
        return embed
    if not hasattr(old, "lm_head") or name not in _last_norms(old):
        return 1.0
    tied = old.lm_head.weight is old.embed.weight
    return head / (embed if tied else 1.0)


def _last_norms(model: Any) -> Sequence[str]:
    """Return the names of the final norm's weight and bias."""
    owner = "decoder.norm" if getattr(model, "decoder", None) is not None else "norm"
    return [f"{owner}.weight", f"{owner}.bias"]


def _fill_(settled: ResolvedModel, values: Mapping[str, Tensor], flags: Mapping[str, bool]) -> None:
    """Load tensors into the model on the meta device; tied parameters stay tied."""
    memo: dict[int, Any] = {}
    described = persistent_tensors(settled.model)
    for name, tensor in described.items():
        if tuple(values[name].shape) != tuple(tensor.shape):
            raise ConfigError(
                f"{name} would have the shape {tuple(values[name].shape)}, but the smaller model "
                f"needs the shape {tuple(tensor.shape)}. Leave this module out of the pruning plan."
            )
        block, key = _split_name(name, settled.sources)
        source = name if block is None else f"{settled.sources[block]}.{key}"
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = (
            nn.Parameter(values[name], requires_grad=flags.get(source, True))
            if is_parameter
            else values[name]
        )
    for module in settled.model.modules():
        for own in (module._parameters, module._buffers):
            for key, tensor in own.items():
                if tensor is not None and id(tensor) in memo:
                    own[key] = memo[id(tensor)]

"""Tensor-parallel plan of a transformers model, derived from transformers' own plan.

Attention and MLPs are sharded. Embedding, output layer, routers and stacked experts are replicated.
A plan that could cause wrong gradients is rejected: every parameter of a sharded sublayer must be
in the plan, or belong to a layer that is known to run before the sharded layers.

For other models each linear layer of the blocks is sharded by its outputs, which are all-gathered.
The model's own code then gets whole tensors, so this is correct for any architecture, but it
communicates more and replicates activations.

Source: `base_model_tp_plan` in transformers' configs; its styles are those of
`transformers.distributed`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from torch import nn

from bmforge.models.rules import TensorParallelRule
from bmforge.nn.dense_weight import is_conv1d
from bmforge.nn.foreign_experts import is_foreign_experts
from bmforge.nn.int8 import Int8Linear
from bmforge.nn.low_rank import linear_sizes
from bmforge.surgery import match_glob

__all__ = ["find_tensor_plan"]

# transformers' style of a linear layer -> style of `TensorParallelRule`.
_LINEAR = {
    "colwise": "own_column",
    "rowwise": "row",
    "colwise_gather_output": "gathered_column",
    "rowwise_split_input": "split_row",
    "mla_kv_a_proj": "shared_tail",
}
# Styles of modules that bmforge replicates.
_WHOLE = frozenset({"moe_tp_experts", "packed_colwise", "packed_rowwise", "embedding_rowwise"})
_HEAD_NORM = "replicated_with_grad_allreduce"
_KEY_VALUE = frozenset({"k_proj", "v_proj"})
# Layers with other numbers of outputs, such as gates of heads, are replicated.
_LEAST_COLUMNS = 8
# Name endings of low-rank projections and routers, whose full outputs enter a sharded layer.
_BEFORE = ("_a_proj", "_a_layernorm", "_a_norm", "gate", "router", "kv_a_proj_with_mqa")


def find_tensor_plan(model: Any) -> tuple[tuple[TensorParallelRule, ...], str]:
    """Return the tensor-parallel plan, and the reason why it cannot be used ("" if it can).

    Args:
        model: `TransformersModel` to shard.
    """
    rules, problem = _find_stated_plan(model)
    if problem:
        rules = _gather_each_layer(model)
    return rules, "" if rules else problem


def _find_stated_plan(model: Any) -> tuple[tuple[TensorParallelRule, ...], str]:
    """Return the plan that transformers states, or the reason why it cannot be used."""
    config = model.foreign.config.get_text_config(decoder=True)
    stated = getattr(config, "base_model_tp_plan", None) or {}
    if not stated or not model.structure.stacks:
        return (), "transformers has no tensor-parallel plan for it"
    if not _has_equal_heads(config):
        return (), "its layers have different numbers of heads"
    stack = model.structure.stacks[0]
    owner = stack.rpartition(".")[0]
    plan = {(f"{owner}.{glob}" if owner else glob): style for glob, style in stated.items()}
    modules = {n: m for n, m in model.named_modules() if n.startswith(f"{stack}.")}
    styles = {n: style for n in modules for glob, style in plan.items() if match_glob(n, glob)}
    rules, problem = _make_rules(modules, styles, config)
    if problem or not rules:
        return (), problem or "its tensor-parallel plan contains no linear layer of the blocks"
    return rules, _find_uncovered(model, modules, styles)


def _has_equal_heads(config: Any) -> bool:
    """Return True if one number of heads, and of key-value heads, applies to all layers."""
    try:
        getattr(config, "num_attention_heads", None)
        getattr(config, "num_key_value_heads", None)
    except RuntimeError:  # transformers refuses to read a value that differs between layers
        return False
    return True


def _gather_each_layer(model: Any) -> tuple[TensorParallelRule, ...]:
    """Return the plan that shards each linear layer by its outputs and gathers them."""
    layers = {name: model.get_submodule(name) for name in model.called_linear()}
    return tuple(
        TensorParallelRule(name, "gathered_column", outputs)
        for name, layer in layers.items()
        if (outputs := _count_outputs(layer)) and outputs % _LEAST_COLUMNS == 0
    )


def _count_outputs(layer: nn.Module) -> int:
    """Return the number of outputs of a linear layer; 0 for packed layers and other modules."""
    is_linear = isinstance(layer, nn.Linear) or is_conv1d(layer)
    sizes = linear_sizes(layer) if is_linear else None
    return 0 if sizes is None else sizes[1]


def _make_rules(
    modules: Mapping[str, nn.Module], styles: Mapping[str, str], config: Any
) -> tuple[tuple[TensorParallelRule, ...], str]:
    """Convert transformers' tensor-parallel styles to `TensorParallelRule`s.

    Returns:
        one rule per module in `styles`, and ""; or () and an error message that names the first
        unsupported style
    """
    rules = []
    for name, style in styles.items():
        module = modules[name]
        if style == _HEAD_NORM:
            rules.append(TensorParallelRule(name, "head_norm"))
        elif _is_linear(module) and style in _LINEAR:
            rules.append(_make_linear_rule(name, module, _LINEAR[style], config))
        elif not (style in _WHOLE and not isinstance(module, nn.Linear)):
            return (), (
                f"its tensor-parallel plan shards {name} as {style!r}, which bmforge does not "
                "support"
            )
    return tuple(rules), ""


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return True for a linear layer whose forward is known, with weights as floats or int8."""
    return type(module) is nn.Linear or isinstance(module, Int8Linear)


def _make_linear_rule(name: str, module: nn.Linear, style: str, config: Any) -> TensorParallelRule:
    """Return the rule of a linear layer; its units are heads or indivisible rows."""
    units = 0
    if style == "shared_tail":
        units = int(config.qk_rope_head_dim)
    elif style in ("gathered_column", "split_row"):
        units = module.out_features if style == "gathered_column" else module.in_features
    elif name.rpartition(".")[2] in _KEY_VALUE:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        units = int(heads)
    elif name.rpartition(".")[2] in ("q_proj", "o_proj", "q_b_proj", "kv_b_proj"):
        units = int(config.num_attention_heads)
    return TensorParallelRule(name, style, units)


def _find_uncovered(model: Any, modules: Mapping[str, nn.Module], styles: Mapping[str, str]) -> str:
    """Return an error message if a sharded sublayer has a parameter without a style; "" if none."""
    # Only "colwise": after gathered or before split layers, every rank has all activations.
    sharded = {n for n, s in styles.items() if s == "colwise" and _is_linear(modules[n])}
    parts = {name.rpartition(".")[0] for name in sharded}
    for name in _parameter_owners(modules):
        inside = any(name == part or name.startswith(f"{part}.") for part in parts)
        covered = any(name == n or name.startswith(f"{n}.") for n in styles)
        if not inside or covered or is_foreign_experts(modules[name]):
            continue
        if not name.endswith(_BEFORE):
            return f"its tensor-parallel plan does not contain {name}"
    idle = model.uncalled(list(_parameter_owners(modules)))
    return f"it reads the weights of {idle[0]} without calling the module" if idle else ""


def _parameter_owners(modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield the names of modules that have parameters themselves, not only in children."""
    for name, module in modules.items():
        if any(True for _ in module.parameters(recurse=False)):
            yield name

"""Looks up modules by the (partial) ModelCenter names in BMCook's configs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from bmforge.compress.matrices import has_weight_matrix
from bmforge.errors import ConfigError, suggest
from bmforge.models.formats.model_center import NAME_RULES
from bmforge.nn.low_rank import linear_sizes

__all__ = ["find_old_module", "modules_with", "old_name", "our_module"]

# Maps ModelCenter's module names to bmforge's.
_MODULES = (
    (r"^(encoder|decoder)\.output_layernorm$", "norm"),
    (r"^(encoder|decoder)\.layers\.", "layers."),
    (r"\.self_att\.layernorm_before_attention$", ".attn_norm"),
    (r"\.cross_att\.layernorm_before_attention$", ".cross_attn_norm"),
    (r"\.ffn\.layernorm_before_ffn$", ".mlp_norm"),
    (r"\.self_att\.self_attention\.project_([qkv])$", r".attn.\1_proj"),
    (r"\.cross_att\.self_attention\.project_([qkv])$", r".cross_attn.\1_proj"),
    (r"\.self_att\.self_attention\.attention_out$", ".attn.o_proj"),
    (r"\.cross_att\.self_attention\.attention_out$", ".cross_attn.o_proj"),
    (r"\.(self_att|self_att\.self_attention)$", ".attn"),
    (r"\.ffn\.ffn\.w_in\.w_0$", ".mlp.gate_proj"),
    (r"\.ffn\.ffn\.w_in\.(w|w_1)$", ".mlp.up_proj"),
    (r"\.ffn\.ffn\.w_out$", ".mlp.down_proj"),
    (r"\.(ffn|ffn\.ffn)$", ".mlp"),
    (r"^input_embedding$", "embed"),
)


def our_module(name: str) -> str:
    """Convert a ModelCenter module name to bmforge's; other names are unchanged."""
    for pattern, replacement in _MODULES:
        name = re.sub(pattern, replacement, name)
    return name


def old_name(name: str, has_gate: bool) -> str:
    """Convert a bmforge parameter name to ModelCenter's."""
    for pattern, replacement in NAME_RULES:
        name = re.sub(pattern, replacement.replace("{up}", "w_1" if has_gate else "w"), name)
    return name


def modules_with(model: nn.Module, patterns: Sequence[str], key: str) -> list[str]:
    """Return the names of modules that have a weight matrix and match one of the patterns.

    Args:
        model: any model; a pattern may occur in a module's bmforge name or in its ModelCenter name.
        patterns: substrings of module names.
        key: config key of the patterns, for error messages.

    Raises:
        ConfigError: a pattern matches no module name.
    """
    has_gate = any(name.endswith("gate_proj") for name, _ in model.named_modules())
    names_of_module: dict[str, tuple[str, ...]] = {}
    for name, module in model.named_modules():
        if name and (has_weight_matrix(module) or linear_sizes(module) is not None):
            full = f"{name}.weight"
            inner = full.removeprefix("model.")
            names_of_module[name] = full, old_name(inner, has_gate)
    matched: dict[str, None] = {}
    for pattern in patterns:
        hits = [
            name
            for name, names in names_of_module.items()
            if any(pattern in entry for entry in names)
        ]
        if not hits:
            olds = [old for _, old in names_of_module.values()]
            raise ConfigError(f"{key}: {pattern!r} matches no module name.{suggest(pattern, olds)}")
        matched.update(dict.fromkeys(hits))
    return list(matched)


def find_old_module(model: nn.Module, name: str) -> str:
    """Return the bmforge name of a module, given its ModelCenter name or its bmforge name.

    Raises:
        ConfigError: the model has no module of that name.
    """
    modules = dict(model.named_modules())
    for candidate in (name, our_module(name), f"model.{our_module(name)}", f"model.{name}"):
        if candidate in modules:
            return candidate
    # In an encoder-decoder the name keeps its stack prefix.
    for stack in ("encoder", "decoder"):
        candidate = f"model.{stack}.{our_module(name)}"
        if name.startswith(f"{stack}.") and candidate in modules:
            return candidate
    raise ConfigError(f"{type(model).__name__} has no module {name!r}.{suggest(name, modules)}")

"""Modules by the names that BMCook's configs call them: ModelCenter's, parts of which suffice."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from bmforge.errors import ConfigError, suggest
from bmforge.models.formats.model_center import NAME_RULES
from bmforge.nn.low_rank import linear_sizes

__all__ = ["find_old_module", "modules_with", "old_name", "our_module"]

# ModelCenter's module -> ours.
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
    """Return our name of a module of ModelCenter's; others' names stay."""
    for pattern, ours in _MODULES:
        name = re.sub(pattern, ours, name)
    return name


def old_name(name: str, has_gate: bool) -> str:
    """Return what ModelCenter calls a parameter of ours."""
    for pattern, theirs in NAME_RULES:
        name = re.sub(pattern, theirs.replace("{up}", "w_1" if has_gate else "w"), name)
    return name


def modules_with(model: nn.Module, patterns: Sequence[str], key: str) -> list[str]:
    """Return the modules with a matrix whose parameter's old or own name contains a pattern.

    Args:
        model: any; of ModelCenter's classes or the zoo's.
        patterns: parts of names.
        key: of the config, for messages.

    Raises:
        ConfigError: a pattern that is in no name.
    """
    has_gate = any(name.endswith("gate_proj") for name, _ in model.named_modules())
    known: dict[str, tuple[str, ...]] = {}
    for name, module in model.named_modules():
        if name and (isinstance(module, nn.Embedding) or linear_sizes(module) is not None):
            full = f"{name}.weight"
            inner = full.removeprefix("model.")
            known[name] = full, old_name(inner, has_gate)
    found: dict[str, None] = {}
    for pattern in patterns:
        hits = [name for name, names in known.items() if any(pattern in one for one in names)]
        if not hits:
            olds = [old for _, old in known.values()]
            raise ConfigError(f"{key}: {pattern!r} is in no module's name.{suggest(pattern, olds)}")
        found.update(dict.fromkeys(hits))
    return list(found)


def find_old_module(model: nn.Module, name: str) -> str:
    """Return what a model calls a module that a config names, by an old name or its own.

    Raises:
        ConfigError: there is none.
    """
    known = dict(model.named_modules())
    for wanted in (name, our_module(name), f"model.{our_module(name)}", f"model.{name}"):
        if wanted in known:
            return wanted
    # An encoder-decoder keeps which stack it is.
    for stack in ("encoder", "decoder"):
        wanted = f"model.{stack}.{our_module(name)}"
        if name.startswith(f"{stack}.") and wanted in known:
            return wanted
    raise ConfigError(f"{type(model).__name__} has no module {name!r}.{suggest(name, known)}")

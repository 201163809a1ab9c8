"""Finds the modules that a target matches.

A target is tried, in this order, as a generic name (`WORDS`), which means the same in every family;
as the last dotted parts of a module's name; as ``[r]`` followed by a regular expression for these
last parts; and as a name glob (see `surgery`). If nothing matches, the same forms are tried on the
module names of published checkpoints, where the name of a fused layer matches all bmforge layers
that it combines.
Source: the rules of endings and regular expressions are OpenDelta's (Hu et al., 2023).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from bmforge.errors import ConfigError, suggest
from bmforge.nn.low_rank import linear_sizes
from bmforge.nn.uncalled_modules import keep_called
from bmforge.surgery import find_repeated_blocks, match_glob, repeated_names

__all__ = [
    "ALL_LINEAR",
    "ROUTERS",
    "WORDS",
    "all_names",
    "excludes_of",
    "find_called",
    "find_places",
    "find_target_parameters",
    "matches_target",
    "is_excluded",
    "known_names",
    "published_names",
]

_REGEX = "[r]"
# PEFT's name for all linear layers of the repeated blocks, except routers.
ALL_LINEAR = "all-linear"
ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})

# Name endings of fused layers that compute queries, keys and values.
_FUSED = (
    ("attn.Wqkv",),
    ("attn.qkv_proj", "self_attention.qkv_proj"),
    ("attention.qkv_proj", "self_attn.Wqkv"),
    ("attn.query_key_value", "self_attn.query_key_value"),
    ("self_attn.W_pack", "attention.wqkv"),
)
# Generic name -> groups of name endings; the first group with a match in the model is used. The
# first group has the names of bmforge's modules, the other groups those of transformers' modules.
WORDS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "attn": (
        ("attn",),
        ("self_attn",),
        ("SelfAttention",),
        ("[r]layers?\\.\\d+\\.attention",),
        ("attention",),
        ("self_attention",),
    ),
    "attn.q": (
        ("attn.q_proj",),
        ("self_attn.q_proj",),
        ("attention.self.query",),
        ("SelfAttention.q",),
        ("attn.c_attn",),
        ("attention.q_lin",),
        ("attention.attention.query",),
        ("attention.query_key_value", "self_attention.query_key_value"),
        ("self_attn.qkv_proj",),
        ("self_attn.q_b_proj", "self_attn.q_proj"),
        *_FUSED,
        ("attn.Wq", "multi_head_attention.Wq"),
        (
            "[r](attention|attn|self_attention|self_attn|decoder)\\.(\\w+\\.)?(q_proj|query|q_b_proj)",
        ),
    ),
    "attn.k": (
        ("attn.k_proj",),
        ("self_attn.k_proj",),
        ("attention.self.key",),
        ("SelfAttention.k",),
        ("attn.c_attn",),
        ("attention.k_lin",),
        ("attention.attention.key",),
        ("attention.query_key_value", "self_attention.query_key_value"),
        ("self_attn.qkv_proj",),
        ("self_attn.kv_b_proj", "self_attn.k_b_proj"),
        *_FUSED,
        ("multi_head_attention.Wk",),
        (
            "[r](attention|attn|self_attention|self_attn|decoder)\\.(\\w+\\.)?(k_proj|key|kv_b_proj|kv_proj)",
        ),
    ),
    "attn.v": (
        ("attn.v_proj",),
        ("self_attn.v_proj",),
        ("attention.self.value",),
        ("SelfAttention.v",),
        ("attn.c_attn",),
        ("attention.v_lin",),
        ("attention.attention.value",),
        ("attention.query_key_value", "self_attention.query_key_value"),
        ("self_attn.qkv_proj",),
        ("self_attn.kv_b_proj", "self_attn.v_b_proj"),
        *_FUSED,
        ("multi_head_attention.Wv",),
        (
            "[r](attention|attn|self_attention|self_attn|decoder)\\.(\\w+\\.)?(v_proj|value|kv_b_proj|kv_proj)",
        ),
    ),
    "attn.o": (
        ("attn.o_proj",),
        ("self_attn.o_proj",),
        ("self_attn.out_proj",),
        ("attention.output.dense",),
        ("SelfAttention.o",),
        ("attn.c_proj",),
        ("attn.out_proj",),
        ("attention.out_lin",),
        ("attention.dense", "self_attention.dense", "self_attn.dense", "attention.o_proj"),
    ),
    "cross_attn": (("cross_attn",), ("EncDecAttention",), ("encoder_attn",), ("crossattention",)),
    "mlp": (("mlp",), ("DenseReluDense",), ("ffn",), ("block_sparse_moe",)),
    "mlp.gate": (
        ("mlp.gate_proj", "mlp.experts", "shared_expert.gate_proj"),
        ("DenseReluDense.wi_0",),
    ),
    "mlp.up": (
        ("mlp.up_proj", "mlp.experts", "shared_expert.up_proj"),
        ("intermediate.dense",),
        ("DenseReluDense.wi", "DenseReluDense.wi_1"),
        ("mlp.c_fc",),
        ("fc1",),
        ("ffn.lin1",),
        ("mlp.dense_h_to_4h", "mlp.fc_in", "mlp.gate_up_proj"),
    ),
    "mlp.down": (
        ("mlp.down_proj", "mlp.experts", "shared_expert.down_proj"),
        ("[r]\\d+\\.output\\.dense",),
        ("DenseReluDense.wo",),
        ("mlp.c_proj",),
        ("fc2",),
        ("ffn.lin2",),
        ("mlp.dense_4h_to_h", "mlp.fc_out"),
    ),
    "norm": (("[r][^.]*[nN]orm(_\\w+)?", "[r]ln_\\w+"),),
    "embed": (
        ("embed",),
        ("embed_tokens", "shared"),
        ("wte",),
        ("word_embeddings",),
    ),
    "lm_head": (("lm_head", "mlm_head.decoder"), ("[r](cls\\.predictions|lm_head)\\.decoder",)),
}


def matches_target(name: str, pattern: str) -> bool:
    """Return True if a module name has this ending or matches this ``[r]`` regular expression.

    Raises:
        ConfigError: the regular expression is invalid.
    """
    if not pattern.startswith(_REGEX):
        return name == pattern or name.endswith("." + pattern)
    try:
        match = re.search(pattern.removeprefix(_REGEX), name)
    except re.error as error:
        raise ConfigError(f"target {pattern!r} is not a valid regex ({error}).") from error
    if match is None or match.end() != len(name):
        return False
    return match.start() == 0 or name[match.start() - 1] == "."


def is_excluded(name: str, exclude: Iterable[str]) -> bool:
    """Return True if a module name has an excluded prefix or matches an excluded pattern."""
    return any(name.startswith(pattern) or _hits(name, pattern) for pattern in exclude)


def known_names(model: nn.Module) -> list[str]:
    """Return all names of a model's modules and parameters, including their Hugging Face names."""
    own = [name for name, _ in model.named_modules() if name]
    return [*own, *all_names(model), *(name for name, _ in model.named_parameters())]


def excludes_of(module_names: Sequence[str], exclude: Iterable[str]) -> list[str]:
    """Return the `exclude` patterns that are in `WORDS` or match at least one module."""
    return [
        pattern
        for pattern in exclude
        if pattern in WORDS or any(is_excluded(n, (pattern,)) for n in module_names)
    ]


def published_names(model: Any) -> dict[str, list[str]]:
    """Return a dict from Hugging Face module name to bmforge's names; {} for other models."""
    rules = getattr(model, "published_rules", None)
    names: dict[str, list[str]] = {}
    for rule in rules() if callable(rules) else ():
        published, own_name = rule.source.rpartition(".")[0], rule.parameter.rpartition(".")[0]
        if published and own_name and own_name not in names.setdefault(published, []):
            names[published].append(own_name)
    repeated = repeated_names(model) if names else set()
    for rule in model.all_rules() if repeated else ():  # the head of a tied model
        if rule.parameter in repeated:
            names.setdefault(rule.source.rpartition(".")[0], [rule.parameter.rpartition(".")[0]])
    return names


def all_names(model: Any) -> dict[str, list[str]]:
    """Return a dict from each alternative name of a model's modules to the names in the model.

    Alternative names are:
    - names in published checkpoints, also if the bmforge model is a submodule of `model`;
    - names that a module's method `published_modules` returns, such as those of ModelCenter;
    - Hugging Face containers with the same contents as one bmforge module (``h.0.attn``).
    """
    names: dict[str, list[str]] = {}
    for prefix, module in model.named_modules():
        before = f"{prefix}." if prefix else ""
        list_names = getattr(module, "published_modules", None)
        for published, own_names in (
            list_names() if callable(list_names) else published_names(module)
        ).items():
            names.setdefault(before + published, [before + name for name in own_names])
    return {**_containers(model, names), **names} if names else {}


def _containers(model: nn.Module, published: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return a dict from Hugging Face container module to the equivalent bmforge module."""
    leaves = {name for names in published.values() for name in names}
    holds, containers = (
        {owner: frozenset(inside) for owner, inside in _inside(pairs).items()}
        for pairs in ([(n, [n]) for n in leaves], published.items())
    )
    own_modules = {inside: name for name, _ in model.named_modules() if (inside := holds.get(name))}
    # A published attention module may include the norm after it; its output is then the norm's.
    for inside, name in list(own_modules.items()):
        if (norm := f"{name}_norm") in leaves:
            own_modules.setdefault(inside | {norm}, norm)
    return {t: [own_modules[inside]] for t, inside in containers.items() if inside in own_modules}


def _inside(pairs: Iterable[tuple[str, list[str]]]) -> dict[str, set[str]]:
    """Return a dict from every dotted prefix of the names to the set of modules below it."""
    modules: dict[str, set[str]] = {}
    for name, meant in pairs:
        parts = name.split(".")
        for count in range(1, len(parts)):
            modules.setdefault(".".join(parts[:count]), set()).update(meant)
    return modules


def find_target_parameters(model: nn.Module, targets: Sequence[str]) -> dict[str, nn.Parameter]:
    """Return a dict from name to parameter: the parameters and whole modules that targets match.

    Raises:
        ConfigError: a target matches neither a module with parameters nor a parameter.
    """
    deltas = {
        id(parameter)
        for module in model.modules()
        if getattr(module, "is_delta", False)
        for parameter in module.parameters()
    }
    named = {n: p for n, p in model.named_parameters() if id(p) not in deltas}
    parameters: dict[str, nn.Parameter] = {}
    for target in targets:
        matched = {target: named[target]} if target in named else {}
        matched = matched or {n: p for n, p in named.items() if _hits(n, target)}
        if not matched:  # permanent parts of the model, such as a template's soft tokens
            parts = {n for n, m in model.named_modules() if hasattr(m, "is_delta")}
            matched = {
                n: p
                for n, p in named.items()
                if (owner := n.rpartition(".")[0]) in parts and _hits(owner, target)
            }
        if not matched:
            owners = tuple(f"{name}." for name in find_places(model, [target]))
            matched = {n: p for n, p in named.items() if n.startswith(owners)}
        if not matched:
            raise ConfigError(f"target {target!r} matches no parameters. Choose other modules.")
        parameters |= matched
    return parameters


def find_places(
    model: nn.Module,
    targets: Sequence[str],
    exclude: Sequence[str] = (),
    needs_all: bool = True,
) -> list[str]:
    """Find the modules that targets match; return their names in the model's order.

    Args:
        model: any model.
        targets: targets in any form of the module docstring.
        exclude: name prefixes, or targets, of modules that are skipped.
        needs_all: True to raise an error if any target matches nothing; False to raise it only if
            no target matches anything.

    Raises:
        ConfigError: a target matches nothing; the message lists similar names.
    """
    # Adapter modules that were attached earlier do not count as modules of the model.
    names = [n for n, m in model.named_modules() if n and not hasattr(m, "is_delta")]
    published = all_names(model)
    chosen: set[str] = set()
    linear = _linear_in_blocks(model) if ALL_LINEAR in targets else []
    for target in targets:
        matched = _find_one(names, linear, published, target, exclude)
        if not matched and needs_all:
            _refuse(model, target, names, published, bool(exclude))
        chosen |= matched
    if not chosen:
        _refuse(model, ", ".join(targets), names, published, bool(exclude))
    return [name for name in names if name in chosen]


def _linear_in_blocks(model: nn.Module) -> list[str]:
    """Return the names of all linear layers in the repeated blocks, except MoE routers."""
    blocks = tuple(f"{name}." for name in find_repeated_blocks(model))
    return [
        name
        for name, module in model.named_modules()
        if name.startswith(blocks)
        and linear_sizes(module) is not None
        and not hasattr(module, "is_delta")
        and name.rpartition(".")[2] not in ROUTERS
    ]


def find_called(
    model: nn.Module, targets: Sequence[str], exclude: Sequence[str], needs_all: bool
) -> list[str]:
    """Return the names of the targeted modules that the model calls.

    An adapter has no effect on a module that is never called.

    Args:
        model, targets, exclude, needs_all: arguments of `find_places`.

    Raises:
        ConfigError: a target that is not a generic name matches a module that the model never
            calls; also for the reasons given in `find_places`.
    """
    names = find_places(model, targets, exclude, needs_all)
    return keep_called(model, names, drops=set(targets) <= {ALL_LINEAR, *WORDS})


def _find_one(
    names: list[str],
    linear: Sequence[str],
    published: Mapping[str, list[str]],
    target: str,
    exclude: Sequence[str],
) -> set[str]:
    selectable = [name for name in published if not is_excluded(name, exclude)]
    excluded = {n for name in published if is_excluded(name, exclude) for n in published[name]}
    excluded = {n for n in names if is_excluded(n, exclude)} | excluded
    if target == ALL_LINEAR:
        return {name for name in linear if name in names} - excluded
    for group in WORDS.get(target, ()):
        matched = {n for n in names if any(matches_target(n, p) for p in group)} - excluded
        if matched:
            return matched
    matched = {n for n in names if _hits(n, target)}
    if not matched:
        matched = {n for name in selectable if _hits(name, target) for n in published[name]}
        matched &= set(names)
    return matched - excluded


def _hits(name: str, target: str) -> bool:
    return matches_target(name, target) or ("*" in target and match_glob(name, target))


def _refuse(
    model: nn.Module,
    target: str,
    names: list[str],
    published: Mapping[str, list[str]],
    has_exclude: bool,
) -> None:
    endings = {".".join(n.split(".")[-k:]) for n in (*names, *published) for k in (1, 2)}
    hint = suggest(target, sorted(endings | {ALL_LINEAR} | set(WORDS) - {target}))
    if target in WORDS:
        linear = {name.rpartition(".")[2] for name in _linear_in_blocks(model)}
        hint = (
            " The word names a layer type that this model does not have; its linear "
            f"layers are {', '.join(sorted(linear))}."
        )
    left = " All modules that the target matches are excluded." if has_exclude else ""
    raise ConfigError(
        f"target {target!r} matches no module of this "
        f"{type(model).__name__}.{hint}{left} A target can be the end of a module name, "
        f"a glob, [r] with a regular expression, or one of {', '.join(WORDS)}."
    )

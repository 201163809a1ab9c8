"""Reads PEFT's adapter directories: converts config fields and tensor names.

Tensors are named after transformers' modules. Where one fused layer of transformers corresponds to
several bmforge layers (`c_attn` = q, k and v), its pair of factors is split into one pair per
bmforge layer, all with the same `down`. If bmforge layers have different `down` factors, they are
written as one pair whose rank is the sum of their ranks and whose `up` is block-diagonal.
Source: PEFT 0.21, `utils/save_and_load.py` and the configs of its tuners.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.errors import CheckpointError, ConfigError
from bmforge.nn.low_rank import LowRank, linear_sizes
from bmforge.shards import Box
from bmforge.surgery import match_glob, persistent_tensors
from bmforge.tune.delta.address import matches_target, published_names
from bmforge.tune.delta.base import AttachedDelta
from bmforge.tune.delta.peft_experts import expert_owner, read_experts
from bmforge.tune.delta.peft_fields import check_fields
from bmforge.tune.delta.peft_fully_trained import PREFIX, module_of, saved_whole, whole_key
from bmforge.tune.delta.peft_fused import concatenate_rows, split_fused
from bmforge.tune.delta.peft_tokens import (
    is_token_key,
    layer_parts,
    read_token_rows,
    token_indices_of,
    token_owner,
)

__all__ = ["PREFIX", "Names", "options_of", "read_tensors", "rows_of", "tie_factors_"]


class Names:
    """Conversion between Hugging Face module names and bmforge's.

    The name of a fused layer corresponds to several bmforge names, in the order of their rows in
    the fused weight.

    Args:
        model: bmforge model; for other models the names are the same.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        published = published_names(model)
        own = {n: [n] for n, m in model.named_modules() if n and not hasattr(m, "tensor_notes")}
        self.own: dict[str, list[str]] = published or own
        self.published = {n: t for t, names in self.own.items() for n in names}
        rules = getattr(model, "published_rules", None)
        self.rules: dict[str, list[Any]] | None = None
        if callable(rules):
            self.rules = {}
            for rule in rules():
                self.rules.setdefault(rule.source, []).append(rule)
        self.tied = _tied_names(model)

    def read_whole(self, published_name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Split a Hugging Face parameter; return a dict from bmforge's name to tensor, or {}.

        Args:
            published_name: Hugging Face name of the parameter.
            tensor: value of the parameter.

        Raises:
            CheckpointError: the value has a different shape than in the model.
        """
        if self.rules is None:
            parameters = dict(self.model.named_parameters())
            return {published_name: tensor} if published_name in parameters else {}
        shapes = {n: p.shape for n, p in persistent_tensors(self.model).items()}
        pieces: dict[str, Tensor] = {}
        for rule in self.rules.get(published_name, ()):
            if rule.index is not None or rule.parameter not in shapes:
                return {}
            shape = tuple(shapes[rule.parameter])
            if tuple(tensor.shape) != rule.source_shape(shape):
                raise CheckpointError(
                    f"{published_name} has the shape {tuple(tensor.shape)} in the file, but "
                    f"{rule.source_shape(shape)} in this {type(self.model).__name__}. Resize the "
                    "token embedding (resize_token_embeddings) or load the adapter's base model."
                )
            box = Box((0,) * len(shape), shape)
            piece = rule.source_view(tensor[rule.source_slices(box)])
            if rule.rows is None:
                pieces[rule.parameter] = piece
            else:
                rule.target(pieces.setdefault(rule.parameter, tensor.new_empty(shape)), box).copy_(
                    piece
                )
        return pieces

    def sources_of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a dict from Hugging Face name to tensor, for bmforge's parameters."""
        if self.rules is None:
            return dict(tensors)
        sources: dict[str, Tensor] = {}
        for published_name, rules in self.rules.items():
            if all(rule.parameter in tensors for rule in rules):
                rows = sorted(rules, key=lambda rule: rule.part[0] if rule.part else 0)
                parts = [rule.to_source(tensors[rule.parameter]) for rule in rows]
                sources[published_name] = rows[0].join(parts, rows)
        return sources

    def row_order(self, published_name: str) -> Tensor | None:
        """Return the row order of an interleaved fused layer; None for other layers."""
        rules = (self.rules or {}).get(f"{published_name}.weight", ())
        return rules[0].interleaved_order(rules) if len(rules) > 1 else None

    def of(self, name: str) -> str:
        """Return the Hugging Face name of a bmforge module.

        Raises:
            ConfigError: published checkpoints have no such module.
        """
        if name not in self.published:
            raise ConfigError(
                f"PEFT's format cannot store the adapter of {name}, because the Hugging Face model "
                "has no such module. Exclude the module from the targets."
            )
        return self.published[name]


def _tied_names(model: Any) -> dict[str, list[str]]:
    """Return a dict from Hugging Face parameter name to the other names of the parameter."""
    if not hasattr(model, "all_rules"):
        return {}
    published_names = {
        rule.parameter: rule.source for rule in model.all_rules() if rule.is_renaming
    }
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in published_names:
            groups.setdefault(id(parameter), []).append(published_names[name])
    return {name: [n for n in group if n != name] for group in groups.values() for name in group}


def rows_of(model: nn.Module, name: str) -> int:
    """Return the number of output features of a linear layer."""
    sizes = linear_sizes(model.get_submodule(name))
    assert sizes is not None
    return sizes[1]


def options_of(
    model: nn.Module, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Convert PEFT's config and tensors to the options of a bmforge adapter.

    Raises:
        ConfigError: an unsupported field would change the outputs; the message names the field.
        CheckpointError: tensors belong to modules that the model does not have.
    """
    check_fields(config)
    kind, names = str(config["peft_type"]), Names(model)
    trained_whole = saved_whole(names, config, tensors)
    options: dict[str, Any] = {"modules_to_save": tuple(trained_whole)}
    if kind in ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING"):
        options["length"] = int(config["num_virtual_tokens"])
        return options | (_prefix_options(model, config) if kind == "PREFIX_TUNING" else {})
    if kind == "LN_TUNING":
        norms = {n for key in tensors for n in _norm_owners(names, key)}
        return {**options, "targets": sorted(norms)}
    modules = {name for key in tensors if (name := module_of(key)) is not None}
    experts = {name: owner for name in modules if (owner := expert_owner(model, name))}
    modules -= experts.keys()
    if unknown := sorted(name for name in modules if name not in names.own):
        raise CheckpointError(
            f"the adapter is attached to {', '.join(unknown[:5])}, which this "
            f"{type(model).__name__} does not have. Load the base model of the adapter."
        )
    targets = [n for name in sorted(modules) for n in names.own[name]]
    options["targets"] = [*targets, *sorted(set(experts.values()))]
    if kind == "IA3":
        feedforward = config.get("feedforward_modules") or []
        into = [name for name in modules if _named(name, feedforward)]
        return {**options, "into": [n for name in into for n in names.own[name]]}
    owners = [token_owner(key, PREFIX) for key in tensors if is_token_key(key)]
    indices = token_indices_of(names, config.get("trainable_token_indices"), owners, _named)
    options |= {"trainable_token_indices": indices}
    return options | _low_rank_options(names, config, modules)


def _prefix_options(model: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a prefix; PEFT's encoder-decoders have prefixes only in the decoder."""
    is_apart = config.get("num_transformer_submodules") == 2
    if is_apart != (getattr(getattr(model, "traits", None), "is_encoder_decoder", False)):
        raise ConfigError(
            f"num_transformer_submodules={config.get('num_transformer_submodules')} does not match "
            f"a {type(model).__name__} (expected: 2 for an encoder-decoder, otherwise 1). Load the "
            "base model of the adapter."
        )
    if not is_apart:
        return {"shift_positions": True}
    names = [n for n, _ in model.named_modules() if match_glob(n, "decoder.layers.*.attn")]
    return {"shift_positions": True, "targets": names}


def _low_rank_options(
    names: Names, config: Mapping[str, Any], modules: Iterable[str]
) -> dict[str, Any]:
    options: dict[str, Any] = {"rank": config["r"], "alpha": float(config["lora_alpha"])}
    options |= {
        "dropout": float(config.get("lora_dropout") or 0),
        "use_rslora": bool(config.get("use_rslora")),
        "use_dora": bool(config.get("use_dora")),
        "bias": bool(config.get("lora_bias")),
    }
    for pattern, field in (("rank_pattern", "ranks"), ("alpha_pattern", "alphas")):
        by_pattern = config.get(pattern) or {}
        options[field] = {
            n: by_pattern[key]
            for name in modules
            if (key := _first_pattern(name, by_pattern)) is not None
            for n in names.own[name]
        }
    return options


def _first_pattern(name: str, patterns: Iterable[str]) -> str | None:
    """Return the first pattern that matches the end of the name, by PEFT's rule."""
    matches = (key for key in patterns if re.match(rf"(.*\.)?({key})$", name))
    return next(matches, None)


def _norm_owners(names: Names, key: str) -> list[str]:
    owner, is_there, _ = key.removeprefix(PREFIX).rpartition(".ln_tuning_layers.")
    if is_there and owner not in names.own:
        raise CheckpointError(
            f"the adapter has the tensor {key}, but this {type(names.model).__name__} has no such "
            "module. Load the base model of the adapter."
        )
    return names.own[owner] if is_there else []


def _named(name: str, patterns: Any) -> bool:
    if isinstance(patterns, str):
        return matches_target(name, f"[r]^{patterns}$")
    return any(matches_target(name, pattern) for pattern in patterns)


def read_tensors(
    delta: AttachedDelta, tensors: Mapping[str, Tensor], blocks: Mapping[str, list[int]]
) -> dict[str, Tensor]:
    """Convert the tensors of a PEFT adapter; return a dict from bmforge's name to tensor.

    Args:
        delta: adapter built from PEFT's config.
        tensors: dict from PEFT's tensor name to tensor.
        blocks: dict from fused layers that bmforge wrote as one block-diagonal LoRA, to the ranks
            of the bmforge layers.
    """
    names, attached = Names(delta.model), {part.owner: part for part in layer_parts(delta)}
    stacks: dict[str, dict[str, dict[str, Tensor]]] = {}
    renamed: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        bare = key.removeprefix(PREFIX)
        published_name, _, leaf = bare.removesuffix(".weight").rpartition(".lora_")
        owner = expert_owner(delta.model, published_name)
        if owner is not None:
            stacks.setdefault(owner, {}).setdefault(published_name, {})[leaf] = tensor
            continue
        for mark in (".lora_", ".ia3_l"):
            published_name, is_there, leaf = bare.rpartition(mark)
            if is_there:
                owners = names.own.get(published_name, [])
                rows = [rows_of(delta.model, n) for n in owners] if len(owners) > 1 else []
                parts = [attached.get(n) for n in owners]
                leaf = leaf.removesuffix(".weight")
                tensor = concatenate_rows(leaf, tensor, names.row_order(published_name))
                renamed |= split_fused(parts, rows, leaf, tensor, blocks.get(published_name))
                break
        else:
            renamed |= _read_other(delta, names, key, tensor)
    for owner, pairs in stacks.items():
        prefix = f"{owner}.{attached[owner].slot}"
        factors = read_experts(prefix, attached[owner].part, pairs)
        renamed |= {f"{prefix}.{key}": tensor for key, tensor in factors.items()}
    return renamed


def _read_other(delta: AttachedDelta, names: Names, key: str, tensor: Tensor) -> dict[str, Tensor]:
    """Convert a tensor outside of adapted modules; return a dict from bmforge's name to tensor."""
    if key == "prompt_embeddings":
        return _read_prompt(delta, tensor)
    if is_token_key(key):
        return read_token_rows(delta, names.own.get(token_owner(key, PREFIX), []), tensor)
    if ".ln_tuning_layers." in key:
        (owner,) = _norm_owners(names, key)
        return {f"{owner}.{key.rpartition('.')[2]}": tensor}
    published_name = whole_key(key)
    return {} if published_name is None else names.read_whole(published_name, tensor)


def _read_prompt(delta: AttachedDelta, rows: Tensor) -> dict[str, Tensor]:
    if delta.kind == "prompt":
        owner, slot, part = delta.held[0]
        return {f"{owner}.{slot}.weight": rows[: part.weight.shape[0]]}
    heads, length, width = delta.held[0].part.key.shape
    if delta.model.traits.is_encoder_decoder:  # type: ignore[union-attr]
        rows = _repeated_layers(rows, len(delta.held))
    if tuple(rows.shape) != (length, 2 * len(delta.held) * heads * width):
        raise CheckpointError(
            f"prompt_embeddings has the shape {tuple(rows.shape)} (expected: "
            f"{(length, 2 * len(delta.held) * heads * width)}). Load the base model of the adapter."
        )
    prefixes = {}
    each = rows.chunk(2 * len(delta.held), 1)  # layer by layer: keys, values
    for number, (owner, slot, part) in enumerate(delta.held):
        heads, _, width = part.key.shape
        for key, rows_of_key in zip(
            ("key", "value"), each[2 * number : 2 * number + 2], strict=True
        ):
            prefixes[f"{owner}.{slot}.{key}"] = rows_of_key.unflatten(1, (heads, width)).transpose(
                0, 1
            )
    return prefixes


def _repeated_layers(rows: Tensor, layers: int) -> Tensor:
    """Return the keys and values that PEFT passes to each decoder layer of an encoder-decoder.

    PEFT's prefix has two tensors (key, value) per layer. PEFT repeats the list of tensors, assigns
    four to every layer and ignores the last two, which are meant for cross-attention. The second
    half of the layers therefore has the same tensors as the first half.
    """
    each = rows.chunk(2 * layers, 1)
    chosen = [each[(4 * i + j) % (2 * layers)] for i in range(layers) for j in (0, 1)]
    return torch.cat(chosen, 1)


def tie_factors_(delta: AttachedDelta, blocks: Mapping[str, Any]) -> None:
    """Make the bmforge layers of each fused layer share one `down` factor, as in PEFT.

    Args:
        delta: adapter loaded from PEFT's files.
        blocks: fused layers to skip, because their bmforge layers have separate `down` factors.
    """
    names = Names(delta.model)
    attached = {part.owner: part.part for part in layer_parts(delta)}
    for published_name, owners in names.own.items():
        parts = [attached[n] for n in owners if n in attached]
        if len(parts) > 1 and published_name not in blocks and isinstance(parts[0], LowRank):
            for part in parts[1:]:
                part.down = parts[0].down

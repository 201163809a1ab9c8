"""Matches the tensors of a checkpoint and a model; one error reports all mismatches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bmforge.errors import CheckpointError, ConfigError
from bmforge.logging import get_logger
from bmforge.models.config import ModelConfig
from bmforge.models.formats.hf_format import WeightFiles
from bmforge.models.weights import OWN_PREFIX, WeightRule
from bmforge.surgery import match_glob, persistent_tensors

__all__ = ["find_missing_head", "match_sources", "resolve_tie"]

# Unused buffers in old checkpoints.
_DEAD = (
    "**.attn.bias",
    "**.attn.masked_bias",
    "**.attention.bias",
    "**.attention.masked_bias",
    "**rotary_emb.inv_freq",
    "**position_ids",
    "**token_type_ids",
)
_LISTED = 20
_COMPARED_ROWS = 1 << 12


def match_sources(
    model: Any, files: WeightFiles, new_head: bool
) -> tuple[list[tuple[WeightRule, str]], list[str], list[str]]:
    """Match every `WeightRule` with a stored tensor; raise `CheckpointError` with all mismatches.

    Returns:
        pairs (rule, stored name); names of the head's tensors to initialize; names of tensors that
        the files need not contain, because an adapter adds them or the model computes them
    """
    local_names = set(persistent_tensors(model))
    # A pipeline stage contains part of the model, but all ranks must raise the same error.
    model = model.whole()
    tensors = persistent_tensors(model)
    shapes = {n: s for n, s in files.shapes.items() if n in tensors or not _is_dead(n)}
    head = model.config.heads[model.config.head]
    pairs, missing, misshaped, new_names, adapter_names, replaced = [], [], [], [], [], set()
    for rule in files.rules_for(model, shapes):
        source = _find_name(model, rule, shapes) or _find_tied(model, rule, shapes)
        if source is None:
            if _is_of_delta(model, rule.parameter) or model.is_computed(rule.parameter):
                adapter_names.append(rule.parameter)
            elif rule.parameter in head.optional or (new_head and model.is_of_head(rule.parameter)):
                new_names.append(rule.parameter)
            else:
                missing.append(rule.source)
            continue
        need = rule.source_shape(tuple(tensors[rule.parameter].shape))
        if shapes[source] != need and new_head and model.is_of_head(rule.parameter):
            new_names.append(rule.parameter)  # the stored head has another number of classes
            replaced.add(source)
            continue
        if shapes[source] != need:
            misshaped.append(f"{source} has shape {shapes[source]}, but the config needs {need}")
        pairs.append((rule, source))
    extra = _find_extra(model, files, shapes, {source for _, source in pairs} | replaced)
    if missing or misshaped or extra:
        _refuse(model, files, missing, extra, misshaped)
    local = ([n for n in names if n in local_names] for names in (new_names, adapter_names))
    return [(r, n) for r, n in pairs if r.parameter in local_names], *local  # type: ignore[return-value]


def find_missing_head(model: Any, source: str | Path | WeightFiles) -> list[str]:
    """Return the checkpoint names of head weights that are missing or have a different shape.

    Optional weights are excluded.

    Args:
        model: model with the head; may be on the meta device.
        source: directory of the weights, or their `WeightFiles`.
    """
    files = source if isinstance(source, WeightFiles) else WeightFiles(source)
    head = model.config.heads[model.config.head]
    tensors, names_missing = persistent_tensors(model), []
    for rule in files.rules_for(model, files.shapes):
        if not model.is_of_head(rule.parameter) or rule.parameter in head.optional:
            continue
        name = _find_name(model, rule, files.shapes)
        need = rule.source_shape(tuple(tensors[rule.parameter].shape))
        if name is None or files.shapes[name] != need:
            names_missing.append(rule.source)
    return names_missing


def resolve_tie(model: Any, files: WeightFiles, value: bool | None = None) -> ModelConfig:
    """Return the model's config with `tie_word_embeddings` set according to the weights.

    Old configs lack the field or contain a wrong value. If a stored head differs from the
    embedding, the weights are not tied; if no head is stored, they are, unless the config
    says otherwise.

    Args:
        model: model of the config, on the meta device.
        files: weight files of the checkpoint.
        value: value requested by the caller; if None, it is inferred from the weights.

    Raises:
        ConfigError: `value` is True but the weights differ, or the model has no output layer.
    """
    config = model.config
    if value is not None:
        return _tie_as_requested(model, files, value)
    head, embed = (_checkpoint_name(model, own_name) for own_name in model.tied_head)
    is_changed = any(OWN_PREFIX + own_name in files.shapes for own_name in model.tied_head)
    stems = [name.removesuffix("weight") for name in (head, embed) if name is not None]
    is_changed = is_changed or any(f"{stem}packed" in files.shapes for stem in stems)
    if head is None or embed is None or is_changed:
        return config
    bare = embed.removeprefix(model.hf_prefix)
    source = next((n for n in (embed, bare) if n in files.shapes), None)
    is_tied = config.tie_word_embeddings and model.tied_head[0] not in persistent_tensors(model)
    if head in files.shapes and source is not None and is_tied:
        if not _are_equal(files, head, source):
            get_logger().warning(
                (
                    "config.json ties %s to the token embedding, but their weights differ. Both "
                    "weights are loaded."
                ),
                head,
            )
            return config.replace(tie_word_embeddings=False)
    elif head not in files.shapes and "tie_word_embeddings" not in config.raw:
        return config.replace(tie_word_embeddings=True)
    return config


def _tie_as_requested(model: Any, files: WeightFiles, value: bool) -> ModelConfig:
    """Return the config with `tie_word_embeddings` set to `value`; see `resolve_tie`."""
    head, embed = (_checkpoint_name(model, own_name) for own_name in model.tied_head)
    if head is None or embed is None:
        raise ConfigError(
            f"tie_word_embeddings={value} has no effect on a {type(model).__name__} with "
            f"head={model.config.head!r}, which has no output layer over the vocabulary. Leave "
            "tie_word_embeddings out."
        )
    bare = embed.removeprefix(model.hf_prefix)
    source = next((n for n in (embed, bare) if n in files.shapes), None)
    is_stored = source is not None and head in files.shapes
    if value and is_stored and not _are_equal(files, head, source):  # type: ignore[arg-type]
        raise ConfigError(
            f"tie_word_embeddings=True would discard {head}, which differs from {embed}. Leave "
            "tie_word_embeddings out."
        )
    config: ModelConfig = model.config.replace(tie_word_embeddings=value)
    return config


def _find_tied(model: Any, rule: WeightRule, shapes: dict[str, tuple[int, ...]]) -> str | None:
    """Return the stored name of the embedding if it initializes an untied head, otherwise None."""
    config = model.config
    if rule.parameter != model.tied_head[0] or config.tie_word_embeddings:
        return None
    if config.raw.get("tie_word_embeddings") is False:
        return None
    embed = _checkpoint_name(model, model.tied_head[1])
    names = () if embed is None else (embed, embed.removeprefix(model.hf_prefix))
    return next((name for name in names if name in shapes), None)


def _is_of_delta(model: Any, name: str) -> bool:
    """Return True for a tensor of an adapter, which the base model's files do not contain."""
    return bool(getattr(model.get_submodule(name.rpartition(".")[0]), "is_delta", False))


def _is_dead(name: str) -> bool:
    return not name.startswith(OWN_PREFIX) and any(match_glob(name, glob) for glob in _DEAD)


def _find_name(model: Any, rule: WeightRule, shapes: dict[str, tuple[int, ...]]) -> str | None:
    """Return the stored name for a `WeightRule`, with any known prefix or suffix, or None."""
    bare = rule.source.removeprefix(model.hf_prefix)
    head_prefix = model.config.heads[model.config.head].prefix or ""
    bare = bare.removeprefix(head_prefix)
    names = [rule.source, bare, model.hf_prefix + bare]
    names += [
        name.removesuffix(new) + old
        for new, old in model.hf_old_names
        for name in names
        if name.endswith(new)
    ]
    return next((name for name in names if name in shapes), None)


def _as_new_name(model: Any, name: str) -> str:
    """Return the name that newer checkpoints use for a tensor."""
    for new, old in model.hf_old_names:
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def _find_extra(
    model: Any, files: WeightFiles, shapes: dict[str, tuple[int, ...]], used: set[str]
) -> list[str]:
    """Return the stored names that no `WeightRule` uses; log unused tensors of other heads."""
    others = files.head_names(model)
    unused: list[str] = []
    extra: list[str] = []
    for name in shapes:
        if name in used or _is_copy(model, files, name):
            continue
        is_other = name in others or _as_new_name(model, name) in others
        is_head = is_other or model.is_unused(name)
        (unused if is_head else extra).append(name)
    if unused and not extra:
        get_logger().info(
            "head %r does not use these tensors: %s", model.config.head, _list(unused)
        )
    return extra


def _is_copy(model: Any, files: WeightFiles, name: str) -> bool:
    """Return True if a tensor, such as a tied head, is stored twice and equals its original."""
    copies = dict(model.tied_copies())
    head, embed = (_checkpoint_name(model, own_name) for own_name in model.tied_head)
    if head is not None and embed is not None and model.config.tie_word_embeddings:
        copies[head] = embed
    original = copies.get(name)
    if original is None:
        return False
    bare = original.removeprefix(model.hf_prefix)
    source = next((n for n in (original, bare) if n in files.shapes), None)
    return source is not None and _are_equal(files, name, source)


def _checkpoint_name(model: Any, name: str) -> str | None:
    return next((rule.source for rule in model.all_rules() if rule.parameter == name), None)


def _are_equal(files: WeightFiles, first: str, second: str) -> bool:
    """Return True if two stored tensors are equal, comparing chunks of rows."""
    if files.shapes[first] != files.shapes[second]:
        return False
    rows = files.shapes[first][0]
    return all(
        torch.equal(files.read(first, part), files.read(second, part))
        for start in range(0, rows, _COMPARED_ROWS)
        for part in [(slice(start, min(start + _COMPARED_ROWS, rows)),)]
    )


def _refuse(
    model: Any, files: WeightFiles, missing: list[str], extra: list[str], misshaped: list[str]
) -> None:
    head = model.config.heads[model.config.head]
    parts = [("missing", sorted(set(missing))), ("unexpected", extra), ("wrong shape", misshaped)]
    text = "; ".join(f"{title}: {_list(names)}" for title, names in parts if names)
    hint = ""
    if missing and set(missing) <= set(head.names.values()):
        hint = (
            f" The checkpoint has no weights for the head {model.config.head!r}. Pass "
            "new_head=True to initialize the head randomly."
        )
    raise CheckpointError(
        f"the weights in {str(files.directory)!r} do not match {type(model).__name__}: "
        f"{text}.{hint}"
    )


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{', '.join(names[:_LISTED])}{more}"

"""Reads and writes the trained embedding rows of PEFT's `trainable_token_indices`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from bmforge.errors import CheckpointError, ConfigError
from bmforge.nn.token_rows import TokenRows
from bmforge.tune.delta.attached import AttachedModule
from bmforge.tune.delta.base import AttachedDelta
from bmforge.tune.delta.records import embedding_name

__all__ = [
    "can_write_tokens",
    "is_token_key",
    "layer_parts",
    "read_token_rows",
    "token_indices_of",
    "token_owner",
    "write_token_rows",
]

_ENDING = ".token_adapter.trainable_tokens_delta"


def is_token_key(key: str) -> bool:
    """Return True for the name of a tensor with trained embedding rows of selected tokens."""
    return key.endswith(_ENDING)


def token_owner(key: str, prefix: str) -> str:
    """Return the Hugging Face name of the layer to which a trainable-tokens tensor belongs."""
    return key.removeprefix(prefix).removesuffix(_ENDING)


def layer_parts(delta: AttachedDelta) -> list[AttachedModule]:
    """Return an adapter's modules, except those that train embedding rows of selected tokens."""
    return [part for part in delta.held if not isinstance(part.part, TokenRows)]


def token_indices_of(
    names: Any, indices: Any, owners: list[str], fits: Callable[[str, Any], bool]
) -> dict[str, list[int]]:
    """Return a dict from bmforge's layer name to the token ids of its trained rows.

    Args:
        names: conversion of module names (`peft_format.Names`).
        indices: value of `trainable_token_indices` in the config.
        owners: Hugging Face names of the layers with trained rows in the file.
        fits: function (Hugging Face name, patterns) that returns True if PEFT targets the layer.

    Raises:
        CheckpointError: trained rows belong to layers that the model does not have.
    """
    kind = type(names.model).__name__
    if unknown := [name for name in owners if name not in names.own]:
        raise CheckpointError(
            f"the adapter's tensor {unknown[0]} matches no module of this {kind}. Load the adapter "
            "into the base model that it was trained on."
        )
    if indices is None:
        return {}
    if isinstance(indices, Mapping):
        own_indices = {
            own: list(rows)
            for owner in owners
            for pattern, rows in indices.items()
            if fits(owner, [pattern])
            for own in names.own[owner]
        }
    else:
        own_indices = {embedding_name(names.model): list(indices)}
    if biased := _biased_heads(names.model, own_indices):
        raise ConfigError(
            f"trainable_token_indices={indices!r} changes {biased[0]}, which has a bias that PEFT "
            "would ignore. Train the tokens again with bmforge's Lora(trainable_token_indices=...)."
        )
    return own_indices


def _biased_heads(model: Any, indices: Mapping[str, Any]) -> list[str]:
    """Return the names of layers with trained rows and a bias, which PEFT would drop."""
    tables = [model.get_submodule(owner).weight for owner in indices]
    return [
        name
        for name, module in model.named_modules()
        if getattr(module, "bias", None) is not None
        and any(getattr(module, "weight", None) is table for table in tables)
    ]


def can_write_tokens(delta: AttachedDelta, names: Any) -> bool:
    """Return True if PEFT would apply the adapter's trained embedding rows in the same way."""
    indices = delta.options.get("trainable_token_indices") or {}
    is_known = all(owner in names.published for owner in indices)
    return is_known and not _biased_heads(names.model, indices)


def read_token_rows(delta: AttachedDelta, owners: list[str], tensor: Tensor) -> dict[str, Tensor]:
    """Return a dict from bmforge's tensor name to the trained rows in a PEFT tensor.

    Args:
        delta: adapter with modules for the trained rows.
        owners: bmforge's name of the layer, or the names of all tied layers.
        tensor: trained rows of PEFT's file.
    """
    parts = [h for h in delta.held if isinstance(h.part, TokenRows) and h.owner in owners]
    return {f"{part.owner}.{part.slot}.weight": tensor for part in parts}


def write_token_rows(delta: AttachedDelta, names: Any, prefix: str) -> dict[str, Tensor]:
    """Return a dict from PEFT's tensor name to trained rows; tied layers occur once, as in PEFT.

    Args:
        delta: adapter with all its modules, unsharded.
        names: conversion of module names (`peft_format.Names`).
        prefix: prefix of every name.
    """
    indices = delta.options.get("trainable_token_indices") or {}
    parts: dict[int, tuple[str, Tensor]] = {}
    for owner, _, part in delta.held:
        if owner in indices and isinstance(part, TokenRows):
            parts.setdefault(id(part.weight), (owner, part.weight.detach()))
    return {f"{prefix}{names.of(owner)}{_ENDING}": rows for owner, rows in parts.values()}

"""Reads the parameters that a PEFT adapter directory contains in full (`modules_to_save`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from bmforge.errors import CheckpointError, ConfigError
from bmforge.surgery import shared_tensors
from bmforge.tune.delta.peft_tokens import is_token_key

__all__ = ["PREFIX", "module_of", "saved_whole", "whole_key"]

PREFIX = "base_model.model."


def module_of(key: str) -> str | None:
    """Return the Hugging Face module name of an adapter tensor; None for other tensors."""
    bare = key.removeprefix(PREFIX)
    for mark in (".lora_", ".ia3_l"):
        if mark in bare:
            return bare.rpartition(mark)[0]
    return None


def whole_key(key: str) -> str | None:
    """Return the Hugging Face name of a parameter saved in full; None for adapter tensors."""
    if key == "prompt_embeddings" or ".ln_tuning_layers." in key or is_token_key(key):
        return None
    if module_of(key) is not None:
        return None
    bare = key.removeprefix(PREFIX) if key.startswith(PREFIX) else key.removeprefix("base_model.")
    owner, _, leaf = bare.rpartition(".")
    if owner.endswith(".base_layer"):
        # PEFT saves the base weight of a targeted embedding too, which is not trained.
        return f"{owner.removesuffix('.base_layer')}.{leaf}" if leaf == "bias" else None
    return bare


def saved_whole(names: Any, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the bmforge parameters that a file contains in full.

    Raises:
        CheckpointError: the model does not have some of these parameters.
        ConfigError: PEFT trained only one of two tied weights.
    """
    saved: dict[str, None] = {}
    for key, tensor in tensors.items():
        published_name = whole_key(key)
        if published_name is None:
            continue
        own_tensors = names.read_whole(published_name, tensor)
        if not own_tensors and not _is_copy(tensors, key):
            raise CheckpointError(
                f"{key} matches no module of this {type(names.model).__name__}. Load the base "
                "model of the adapter with the head with which it was trained (with "
                "tie_word_embeddings=False if head and embedding were trained separately)."
            )
        saved.update(dict.fromkeys(own_tensors))
    _refuse_untied(names, config, saved)
    return list(saved)


def _is_copy(tensors: Mapping[str, Tensor], key: str) -> bool:
    """Return True if another tensor in the file has the same values, as tied tensors do."""
    tensor = tensors[key]
    others = (t for name, t in tensors.items() if name != key and t.shape == tensor.shape)
    return any(torch.equal(tensor, other) for other in others)


def _refuse_untied(names: Any, config: Mapping[str, Any], parameters: Iterable[str]) -> None:
    """Raise `ConfigError` if PEFT trained only one of two tied weights."""
    if config.get("ensure_weight_tying") or not config.get("modules_to_save"):
        return
    shared, named = shared_tensors(names.model), dict(names.model.named_parameters())
    for name in parameters:
        if name in named and id(named[name]) in shared:
            raise ConfigError(
                f"modules_to_save={config['modules_to_save']} without ensure_weight_tying unties "
                f"{name} in PEFT, but this {type(names.model).__name__} ties the weight. Load the "
                "model with tie_word_embeddings=False."
            )

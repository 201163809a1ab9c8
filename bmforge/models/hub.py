"""The families by name: opening any checkpoint, and finding a preset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bmforge.errors import ConfigError, suggest
from bmforge.models.base import Model
from bmforge.models.config import ModelConfig, read_config_file
from bmforge.models.gpt2 import GPT2
from bmforge.models.llama import Llama
from bmforge.models.resolve import resolve_model

__all__ = ["FAMILIES", "AutoModel", "find_preset"]

FAMILIES: dict[str, type[Model]] = {"gpt2": GPT2, "llama": Llama}


def find_preset(name: str) -> tuple[type[Model], ModelConfig]:
    """Return the family and config of a preset by its name.

    Raises:
        ConfigError: no family has such a preset; the nearest is named.
    """
    for family in FAMILIES.values():
        if name in family.config_class.presets:
            return family, family.config_class.preset(name)
    known = [n for f in FAMILIES.values() for n in f.config_class.presets]
    raise ConfigError(f"no preset {name!r}.{suggest(name, known)} Known: {', '.join(known)}.")


class AutoModel:
    """Opens a checkpoint of any family by the `model_type` in its config.json."""

    @staticmethod
    def family_of(raw: dict[str, Any]) -> type[Model]:
        """Return the class for a config.json's contents.

        Raises:
            ConfigError: a model_type that no family handles.
        """
        kind = raw.get("model_type")
        if kind not in FAMILIES:
            raise ConfigError(
                f"model_type={kind!r} is not known.{suggest(str(kind), FAMILIES)} "
                f"Known: {', '.join(sorted(FAMILIES))}."
            )
        return FAMILIES[kind]

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        allow_unknown: tuple[str, ...] = (),
    ) -> Model:
        """Open a checkpoint; see `Model.from_pretrained`."""
        directory = resolve_model(name)
        family = cls.family_of(read_config_file(directory))
        return family.from_pretrained(
            directory, dtype=dtype, device=device, allow_unknown=allow_unknown
        )

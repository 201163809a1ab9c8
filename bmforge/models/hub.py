"""Lookup of families by name: open any checkpoint, find a preset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bmforge.errors import ConfigError, suggest
from bmforge.gguf_header import is_gguf
from bmforge.models.base import Model
from bmforge.models.config import ModelConfig, read_config_file
from bmforge.models.families import FAMILIES
from bmforge.models.formats.hf_format import WeightFiles
from bmforge.models.resolve import resolve_model

__all__ = ["FAMILIES", "AutoModel", "find_config", "find_model", "find_preset"]


def find_preset(name: str) -> tuple[type[Model], ModelConfig]:
    """Return family and config of a preset by its name or that of its weights.

    Raises:
        ConfigError: unknown preset; the message names the nearest.
    """
    for family in FAMILIES.values():
        presets, ids = family.config_class.presets, family.config_class.hub_ids
        # Weights have several names: short ones and their hub id.
        hub_id = ids.get(name, name)
        same = (key for key in presets if ids.get(key) == hub_id)
        preset = name if name in presets else next(same, None)
        if preset is not None:
            return family, family.config_class.preset(preset)
    names = [n for f in FAMILIES.values() for n in f.config_class.presets]
    raise ConfigError(f"unknown preset {name!r} (known: {', '.join(names)}).{suggest(name, names)}")


def find_config(name: str) -> tuple[type[Model], ModelConfig]:
    """Return family and config of a model directory, GGUF file or preset.

    Raises:
        ConfigError: neither a preset nor a model.
    """
    if not is_gguf(name) and not (Path(name) / "config.json").is_file():
        return find_preset(name)
    raw = read_config_file(name)
    family = AutoModel.family_of(raw)
    return family, family.config_class.from_hf(raw)


def find_model(name: str | Path) -> Path:
    """Return the directory of a model given as a directory, hub id or short name.

    Raises:
        ConfigError: it is neither a directory, nor in the cache, nor on the hub.
    """
    hub_ids = {k: v for f in FAMILIES.values() for k, v in f.config_class.hub_ids.items()}
    return resolve_model(name, hub_ids)


class AutoModel:
    """Loads a checkpoint of any family by the `model_type` in its config.json."""

    @staticmethod
    def family_of(raw: dict[str, Any]) -> type[Model]:
        """Return the class for the contents of a config.json.

        Raises:
            ConfigError: no family supports the model_type.
        """
        for family in FAMILIES.values():
            if family.config_class.opens(raw):
                return family
        kind = raw.get("model_type")
        configs = [family.config_class for family in FAMILIES.values()]
        supported = sorted({t for c in configs for t in c.model_types or (c.family,)})
        raise ConfigError(
            f"unsupported model_type={kind!r} (supported: {', '.join(supported)})."
            f"{suggest(str(kind), supported)}"
        )

    @classmethod
    def from_pretrained(cls, name: str | Path, **options: Any) -> Model:
        """Load a checkpoint; the options are those of `Model.from_pretrained`."""
        family, directory = cls._find(name)
        return family.from_pretrained(directory, **options)

    @classmethod
    def describe_pretrained(cls, name: str | Path, **options: Any) -> tuple[Model, WeightFiles]:
        """Describe a checkpoint; the options are those of `Model.describe_pretrained`."""
        family, directory = cls._find(name)
        return family.describe_pretrained(directory, **options)

    @classmethod
    def _find(cls, name: str | Path) -> tuple[type[Model], Path]:
        directory = find_model(name)
        raw = read_config_file(directory)
        if "model_type" not in raw and (directory / "pytorch_model.pt").is_file():
            raise ConfigError(
                f"{str(name)!r} is in ModelCenter's format. Convert it: bmforge convert {name} "
                "DIRECTORY."
            )
        return cls.family_of(raw), directory

"""The families by name: opening any checkpoint, and finding a preset."""

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
    """Return the family and config of a preset by its name, or by that of its weights.

    Raises:
        ConfigError: no family has such a preset; the nearest is named.
    """
    for family in FAMILIES.values():
        presets, ids = family.config_class.presets, family.config_class.hub_ids
        # Weights go by several names: short ones, and their place on the hub.
        wanted = ids.get(name, name)
        same = (key for key in presets if ids.get(key) == wanted)
        preset = name if name in presets else next(same, None)
        if preset is not None:
            return family, family.config_class.preset(preset)
    known = [n for f in FAMILIES.values() for n in f.config_class.presets]
    raise ConfigError(f"no preset {name!r}.{suggest(name, known)} Known: {', '.join(known)}.")


def find_config(name: str) -> tuple[type[Model], ModelConfig]:
    """Return the family and config of a model directory or GGUF file, or of a preset by its name.

    Raises:
        ConfigError: neither a preset nor a model.
    """
    if not is_gguf(name) and not (Path(name) / "config.json").is_file():
        return find_preset(name)
    raw = read_config_file(name)
    family = AutoModel.family_of(raw)
    return family, family.config_class.from_hf(raw)


def find_model(name: str | Path) -> Path:
    """Return the directory of a model by directory, hub id or any family's short name.

    Raises:
        ConfigError: neither here, nor in the cache, nor on the hub.
    """
    hub_ids = {k: v for f in FAMILIES.values() for k, v in f.config_class.hub_ids.items()}
    return resolve_model(name, hub_ids)


class AutoModel:
    """Opens a checkpoint of any family by the `model_type` in its config.json."""

    @staticmethod
    def family_of(raw: dict[str, Any]) -> type[Model]:
        """Return the class for a config.json's contents.

        Raises:
            ConfigError: a model_type that no family handles.
        """
        for family in FAMILIES.values():
            if family.config_class.opens(raw):
                return family
        kind = raw.get("model_type")
        configs = [family.config_class for family in FAMILIES.values()]
        known = sorted({t for c in configs for t in c.model_types or (c.family,)})
        raise ConfigError(
            f"model_type={kind!r} is not known.{suggest(str(kind), known)} "
            f"Known: {', '.join(known)}."
        )

    @classmethod
    def from_pretrained(cls, name: str | Path, **options: Any) -> Model:
        """Open a checkpoint; the options are those of `Model.from_pretrained`."""
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
                f"{str(name)!r} is in ModelCenter's form. Convert it once: bmforge convert "
                f"{name} DIRECTORY."
            )
        return cls.family_of(raw), directory

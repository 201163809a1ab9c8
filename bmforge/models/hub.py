"""Finding a model: a directory, the Hugging Face cache, or the hub, in this order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from bmforge.errors import ConfigError, suggest
from bmforge.models.base import Model
from bmforge.models.config import ModelConfig, read_config_file
from bmforge.models.gpt2 import GPT2
from bmforge.models.llama import Llama

__all__ = ["FAMILIES", "AutoModel", "find_preset", "resolve_model"]

FAMILIES: dict[str, type[Model]] = {"gpt2": GPT2, "llama": Llama}

_WANTED = ["*.json", "*.safetensors", "*.bin", "tokenizer*", "vocab*", "merges*"]


def resolve_model(name: str | Path) -> Path:
    """Return the directory of a model: `name` itself, its cached copy, or a fresh download.

    Raises:
        ConfigError: no such directory, and neither the cache nor the hub has it.
    """
    path = Path(name)
    if path.is_dir():
        return path
    if path.exists():
        raise ConfigError(f"{str(name)!r} is a file; give the directory that holds config.json.")
    try:
        return Path(snapshot_download(str(name), allow_patterns=_WANTED, local_files_only=True))
    except HFValidationError as error:
        raise ConfigError(f"{str(name)!r} is neither a directory nor a hub id.") from error
    except LocalEntryNotFoundError:
        pass  # not cached: ask the hub next
    try:
        return Path(snapshot_download(str(name), allow_patterns=_WANTED))
    except Exception as error:
        raise ConfigError(
            f"{str(name)!r} is not a directory, not in the Hugging Face cache, and the hub could "
            f"not be asked ({type(error).__name__}). Offline, put config.json and the weights into "
            f"the directory {str(path.absolute())!r}."
        ) from error


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

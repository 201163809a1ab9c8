"""Checks the name of a model, such as a mistyped path, without importing torch."""

from __future__ import annotations

import os
from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path

from bmforge.errors import ConfigError, suggest

__all__ = ["check_model_path", "find_neighbors", "plain_name", "unknown_model"]

_MODEL_FILES = ("config.json", "run.toml", "adapter_config.json")


def check_model_path(name: str | Path) -> None:
    """Raise `ConfigError` for the path of a directory or GGUF file that does not exist.

    Other names may be those of a preset or of a model of the hub, which are NAME or OWNER/NAME.
    """
    path = Path(name)
    if path.exists():
        return
    if path.suffix == ".gguf":
        raise ConfigError(
            f"the GGUF file {str(path)!r} does not exist.{_suggest_neighbor(path)} Check the path."
        )
    is_explicit = str(name).startswith((".", "~")) or path.is_absolute()
    if is_explicit or len(path.parts) > 2 or (os.sep == "\\" and "\\" in str(name)):
        raise ConfigError(
            f"no such directory: {str(name)!r} (a model of the hub is named OWNER/NAME)."
            f"{_suggest_neighbor(path)} Check the path."
        )


def unknown_model(name: str, names: Collection[str]) -> ConfigError:
    """Return the error for a name that is neither a directory, nor in `names`, nor a hub id."""
    near = get_close_matches(name, dict.fromkeys([*find_neighbors(Path(name)), *names]), n=3)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    return ConfigError(
        f"unknown model: model={name!r} (expected: a preset, a family, a directory, or "
        f"the id of a hub model with its owner, such as openai-community/gpt2).{hint} "
        "`bmforge info` lists all presets and families."
    )


def plain_name(name: str) -> str:
    """Return a family's name without case and hyphens: CPM-Bee becomes cpmbee."""
    return name.lower().replace("-", "").replace("_", "")


def find_neighbors(path: Path) -> list[str]:
    """Return the model, run and adapter directories and GGUF files next to a path."""
    try:
        siblings = sorted(path.parent.iterdir())
        return [
            str(other)
            for other in siblings
            if other.suffix == ".gguf" or any((other / name).is_file() for name in _MODEL_FILES)
        ]
    except OSError:  # no such directory, or no permission
        return []


def _suggest_neighbor(path: Path) -> str:
    return suggest(str(path), find_neighbors(path))

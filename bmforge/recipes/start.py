"""Starting from a model: its sizes hold, but for the fields of `model` that were given."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bmforge.errors import ConfigError, suggest
from bmforge.models import Model
from bmforge.models.config import ModelConfig, read_config_file
from bmforge.models.formats.hf_format import WeightFiles
from bmforge.models.hub import FAMILIES, find_model
from bmforge.models.load import settle_tie

__all__ = ["change_model", "family_of", "record_given", "settle_model"]

_OPTION = "--model."


def family_of(config: ModelConfig) -> type[Model]:
    """Return the family of a model config."""
    return next(f for f in FAMILIES.values() if f.config_class is type(config))


def record_given(config: Any, file: str | Path | None, options: Sequence[str]) -> Any:
    """Return a config that says which fields of `model` its file and its options gave.

    Args:
        config: a `RunConfig`, read from them.
        file: the TOML file.
        options: ``--field.path VALUE`` ...
    """
    if config.init_from is None:
        return config
    names = set(config.model_changes or ())
    if file is not None:
        names |= tomllib.loads(Path(file).read_text(encoding="utf-8")).get("model", {}).keys()
    for option in options:
        if option.startswith(_OPTION):
            name = option.removeprefix(_OPTION).partition("=")[0].partition(".")[0]
            names.add(name.replace("-", "_"))
    return dataclasses.replace(config, model_changes=tuple(sorted(names - {"raw"})))


def change_model(config: Any, **changes: Any) -> Any:
    """Return a config with fields of `model` changed, also beside `init_from`, but the usual."""
    usual = type(config)().model
    given = {name for name, value in changes.items() if value != getattr(usual, name)}
    names = None if config.init_from is None else tuple(sorted(given | set(_given(config))))
    model = config.model.replace(**changes)
    return dataclasses.replace(config, model=model, model_changes=names)


def settle_model(config: Any) -> Any:
    """Return a config with the sizes that hold: with `init_from` that model's, but for those given.

    `model_changes` then names the fields that are not the model's own.

    Raises:
        ConfigError: `init_from` is another family, or `model_changes` names what there is not.
    """
    model = config.model
    if config.init_from is None:
        if config.model_changes:
            raise ConfigError(
                f"model_changes={list(config.model_changes)} has no effect without init_from: all "
                "of `model` holds. Leave it out."
            )
        return config
    directory = find_model(config.init_from)
    if not type(model).opens(read_config_file(directory)):
        raise ConfigError(
            f"init_from={config.init_from!r} is no {family_of(model).__name__}, which this recipe "
            "trains. Name another model, or another recipe."
        )
    described = family_of(model).from_config(type(model).from_pretrained(directory), device="meta")
    own = settle_tie(described, WeightFiles(directory))
    # What follows from others follows from the changed ones.
    sizes = own.with_implied().replace(**{name: getattr(model, name) for name in _given(config)})
    changed = [f.name for f in dataclasses.fields(own) if f.compare]
    changed = [name for name in changed if getattr(sizes, name) != getattr(own, name)]
    # Its config.json comes back where it is built: run.toml has no place for what is null in it.
    return dataclasses.replace(config, model=sizes.replace(raw={}), model_changes=tuple(changed))


def _given(config: Any) -> list[str]:
    """Return the fields of `model` that hold beside `init_from`."""
    model = config.model
    names = [f.name for f in dataclasses.fields(model) if f.name != "raw"]
    if config.model_changes is None:
        usual = type(config)().model
        return [name for name in names if getattr(model, name) != getattr(usual, name)]
    for name in config.model_changes:
        if name not in names:
            raise ConfigError(
                f"model_changes names {name!r}, which is no field of {type(model).__name__}."
                f"{suggest(name, names)}"
            )
    return list(config.model_changes)

"""Resolves the model of a run: a preset to initialize randomly, or an initial model to load.

The sizes of an initial model apply, except for fields that are set in `model`.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bmforge.errors import CheckpointError, ConfigError, suggest
from bmforge.gguf_header import is_gguf
from bmforge.model_names import unknown_model
from bmforge.models import Model
from bmforge.models.changes import Change
from bmforge.models.config import ModelConfig, read_config_file
from bmforge.models.formats.hf_format import WeightFiles
from bmforge.models.hub import (
    FAMILIES,
    AutoModel,
    family_of_config,
    find_family,
    find_model,
    find_preset,
    names_directory,
)
from bmforge.models.tensor_matching import find_missing_head, match_sources, resolve_tie
from bmforge.models.traits import Traits

__all__ = [
    "Start",
    "change_model",
    "changed_fields",
    "check_length",
    "family_of",
    "find_start",
    "need_fields",
    "read_changes",
    "record_given",
    "complete_model_config",
    "soft_prompt_length",
    "traits_of",
    "with_changes",
]

_OPTION = "--model."


@dataclasses.dataclass(frozen=True)
class Start:
    """Model to which the option `--model` resolves.

    Args:
        family: family of the model.
        config: config of the model.
        init_from: initial model; None for a random initialization.
    """

    family: type[Model]
    config: ModelConfig
    init_from: str | None = None


def find_start(name: str) -> Start:
    """Resolve a model name to a family, a config and an initial model.

    Args:
        name: directory or hub id of an initial model; or a preset (gpt2-small) or a family (gpt2),
            which is initialized randomly. A directory takes precedence.

    Raises:
        ConfigError: the name is unknown.
    """
    if names_directory(name) or is_gguf(name):
        return _start_from(name)
    presets = [preset for family in FAMILIES.values() for preset in family.config_class.presets]
    if name in presets:
        return Start(*find_preset(name))
    family = find_family(name)
    if family is not None:
        sizes: Any = family.config_class
        return Start(family, sizes())
    short = {key for family in FAMILIES.values() for key in family.config_class.hub_ids}
    if "/" not in name and name not in short and not Path(name).is_dir():
        raise unknown_model(name, [*presets, *(key.lower() for key in FAMILIES)])
    return _start_from(name)


def _start_from(name: str) -> Start:
    directory = find_model(name)
    family = AutoModel.family_of(read_config_file(directory))
    return Start(family, _read_sizes(family, directory).replace(raw={}), name)


def traits_of(config: ModelConfig) -> Traits:
    """Return the `Traits` (attention pattern, objective, ...) of a model with this config."""
    return family_of(config).family_traits.of(config)


def check_length(config: Any) -> None:
    """Raise `ConfigError` if data.seq_len, with a soft prompt, exceeds the maximum length."""
    limit = traits_of(config.model).row_limit(config.model)
    prompt = soft_prompt_length(config)
    if limit is not None and config.data.seq_len + prompt > limit:
        added = f" + adapter.length={prompt}" if prompt else ""
        raise ConfigError(
            f"data.seq_len={config.data.seq_len}{added} is more than model.max_seq_len={limit}. "
            "Reduce data.seq_len, or raise model.max_seq_len."
        )


def soft_prompt_length(config: Any) -> int:
    """Return the number of tokens that the run's adapter prepends to every sequence."""
    return (config.adapter.length or 0) if config.adapter.kind == "soft-prompt" else 0


def family_of(config: ModelConfig) -> type[Model]:
    """Return the family of a model config."""
    return family_of_config(config)


def with_changes(config: Any) -> Any:
    """Return the model config with the run's structural changes (option `changes`) applied."""
    model = config.model
    return model.replace(changes=(*model.changes, *config.changes)) if config.changes else model


def read_changes(option: str) -> tuple[Change, ...]:
    """Parse the option `changes`: structural changes of the model, see `models.changes`.

    Args:
        option: JSON text or path of a JSON file, with one change or a list; each has the keys
            kind, where and options.

    Raises:
        ConfigError: the file is missing, or the JSON has a different structure.
    """
    text = option
    if not option.lstrip().startswith(("[", "{")):
        try:
            text = Path(option).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--changes {option!r} is neither JSON nor a readable file ({error}). Pass JSON, "
                "or the path of a JSON file."
            ) from error
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"--changes {option!r} is not valid JSON ({error}). Correct the JSON."
        ) from error
    return tuple(
        Change.from_json(entry) for entry in (parsed if isinstance(parsed, list) else [parsed])
    )


def record_given(config: Any, file: str | Path | None, options: Sequence[str]) -> Any:
    """Set `model_changes` of a config to the `model` fields that a file and options set.

    Args:
        config: a `RunConfig` that was read from the file and the options.
        file: the TOML file.
        options: command line options, ``--field.path VALUE`` ...
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
    """Change fields of a config's `model`, which then also override those of `init_from`."""
    usual = type(config)().model
    changed_names = {name for name, value in changes.items() if value != getattr(usual, name)}
    names = None if config.init_from is None else tuple(sorted(changed_names | set(_given(config))))
    model = config.model.replace(**changes)
    return dataclasses.replace(config, model=model, model_changes=names)


def complete_model_config(config: Any) -> Any:
    """Return a config with final model sizes: those of `init_from`, except for set fields.

    `model_changes` then names the fields that differ from the initial model.

    Raises:
        ConfigError: `init_from` is another family, or `model_changes` has an unknown field.
    """
    model = config.model
    if config.family not in (None, family_of(model).__name__):
        raise ConfigError(
            f"family={config.family!r}, but the model is a {family_of(model).__name__}. Leave "
            "family out, because --model determines it."
        )
    if config.init_from is None:
        if config.model_changes:
            raise ConfigError(
                f"model_changes={list(config.model_changes)} has no effect without init_from: a "
                "model trained from scratch uses all fields of `model`. Remove model_changes."
            )
        return config
    directory = find_model(config.init_from)
    if not type(model).opens(read_config_file(directory)):
        raise ConfigError(
            f"init_from={config.init_from!r} is not a {family_of(model).__name__}, the only "
            "family that this recipe trains. Choose another model or another recipe."
        )
    own = _read_sizes(family_of(model), directory)
    # Derived fields are recomputed from the changed ones.
    sizes = own.without_derived().replace(**{name: getattr(model, name) for name in _given(config)})
    changed = [f.name for f in dataclasses.fields(own) if f.compare]
    changed = [name for name in changed if getattr(sizes, name) != getattr(own, name)]
    # config.json is read again when the model is built: TOML cannot store its nulls.
    return dataclasses.replace(config, model=sizes.replace(raw={}), model_changes=tuple(changed))


def _read_sizes(family: type[Model], directory: Path) -> ModelConfig:
    """Return the config of a model; embeddings are tied if they are tied in the stored weights."""
    files = WeightFiles(directory)
    config = family.complete_from_shapes(
        family.config_class.from_pretrained(directory), files.shapes
    )
    return resolve_tie(family.from_config(config, device="meta"), files)


def changed_fields(config: Any) -> list[str]:
    """Return the names of the `model` fields that differ from the initial model, or the preset."""
    if config.init_from is None:
        return _given(config)
    return list(complete_model_config(config).model_changes)


def need_fields(config: Any, needs: Mapping[str, Any]) -> Any:
    """Set the `model` fields that a task requires in a config; return the new config.

    Args:
        config: the run's config after `complete_model_config`.
        needs: required fields and values, such as the head.

    Raises:
        ConfigError: the family does not have the required head; the initial model does not have
            it, and `new_head` is off; or its weights do not have the sizes of `model`.
        CheckpointError: weights are missing or unknown.
    """
    model = config.model
    changed = [name for name in config.model_changes or () if name not in needs]
    missing = {name: value for name, value in needs.items() if getattr(model, name) != value}
    if missing:
        names = config.model_changes
        if config.init_from is not None:
            names = tuple(sorted({*(names or ()), *missing}))
        config = dataclasses.replace(config, model=model.replace(**missing), model_changes=names)
    if config.init_from is None:
        return config
    files = WeightFiles(find_model(config.init_from))
    sizes = config.model.replace(raw=read_config_file(files.directory))
    described = family_of(sizes).from_config(sizes, device="meta")
    try:
        match_sources(described, files, new_head=True)
    except CheckpointError as error:
        if not changed:
            raise
        values = ", ".join(f"model.{name}={getattr(sizes, name)!r}" for name in changed)
        raise ConfigError(
            f"{str(error).rstrip('.')}. The run changes the sizes of {config.init_from!r} "
            f"({values}). Leave these options out."
        ) from error
    lacking = [] if config.new_head else find_missing_head(described, files)
    if lacking:
        raise ConfigError(
            f"{config.init_from!r} has no head {config.model.head!r}, which this task trains: "
            f"{', '.join(lacking)} are missing, or have the shape of another number of classes. "
            "Set new_head=True (--new-head) to initialize a new head."
        )
    return config


def _given(config: Any) -> list[str]:
    """Return the names of the `model` fields that override those of `init_from`."""
    model = config.model
    names = [f.name for f in dataclasses.fields(model) if f.name != "raw"]
    if config.model_changes is None:
        usual = type(config)().model
        return [name for name in names if getattr(model, name) != getattr(usual, name)]
    for name in config.model_changes:
        if name not in names:
            raise ConfigError(
                f"model_changes contains {name!r}, which is not a field of "
                f"{type(model).__name__}.{suggest(name, names)}"
            )
    return list(config.model_changes)

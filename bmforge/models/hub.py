"""Finds model families: loads any checkpoint, and looks up presets."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

from bmforge.errors import ConfigError, suggest
from bmforge.files import find_export
from bmforge.gguf_header import is_gguf
from bmforge.logging import get_logger
from bmforge.model_names import find_neighbors, plain_name
from bmforge.models.adapter_dirs import find_base, head_of_adapter, is_adapter
from bmforge.models.base import Model
from bmforge.models.changes import CHANGES_KEY
from bmforge.models.config import ModelConfig, read_config_file
from bmforge.models.families import FAMILIES
from bmforge.models.file_fingerprint import fingerprint_of_files
from bmforge.models.formats.hf_format import WeightFiles
from bmforge.models.resolve import resolve_model

__all__ = [
    "FAMILIES",
    "AutoModel",
    "Backend",
    "family_of_config",
    "find_base_model",
    "find_config",
    "find_family",
    "find_model",
    "find_preset",
    "head_options",
    "names_directory",
]

Backend = Literal["auto", "native", "transformers"]


def find_preset(name: str) -> tuple[type[Model], ModelConfig]:
    """Return the model class and config of a preset, given its name, hub id or short name.

    Raises:
        ConfigError: the preset is unknown; the message suggests the nearest name.
    """
    for family in FAMILIES.values():
        presets, ids = family.config_class.presets, family.config_class.hub_ids
        # Weights have several names: their hub id and short names.
        hub_id = ids.get(name, name)
        same = (key for key in presets if ids.get(key) == hub_id)
        preset = name if name in presets else next(same, None)
        if preset is not None:
            return family, family.config_class.preset(preset)
    names = [*_preset_names(), *find_neighbors(Path(name))]
    if Path(name).is_dir():
        raise ConfigError(
            f"{name!r} is not a model directory: it contains no config.json. Pass a directory "
            "with config.json and weights."
        )
    raise ConfigError(
        f"unknown preset {name!r}.{suggest(name, names)} `bmforge info` lists the presets; "
        "for another model, pass its directory with config.json."
    )


def find_config(name: str, backend: Backend = "auto") -> tuple[type[Model], ModelConfig]:
    """Return the model class and config of a model directory, GGUF file or preset.

    Raises:
        ConfigError: the name is neither a preset nor a model.
    """
    if not is_gguf(name) and not names_directory(name):
        return find_preset(name)
    raw = read_config_file(name)
    family = AutoModel.family_of(raw, backend)
    return family, family.config_class.from_hf(raw)


def names_directory(name: str) -> bool:
    """Return True if a name is a model directory; directories have priority over presets.

    A log line reports a preset or family that has the same name.
    """
    if not (Path(name) / "config.json").is_file():
        return False
    # Looking up names imports every family, which is not needed for a path.
    is_path = Path(name).name != name
    if not is_path and (name in _preset_names() or find_family(name) is not None):
        get_logger().info(
            "%s is read from the directory ./%s, not from the preset or family of that name",
            name,
            name,
        )
    return True


def find_family(name: str) -> type[Model] | None:
    """Return the model class with this name in any spelling (CPM-Bee, cpmbee); None if unknown."""
    plain = plain_name(name)
    for key, family in FAMILIES.items():
        if plain in (plain_name(key), plain_name(family.config_class.family)):
            return family
    return None


def _preset_names() -> list[str]:
    return [name for family in FAMILIES.values() for name in family.config_class.presets]


def family_of_config(config: ModelConfig) -> type[Model]:
    """Return the model class of a config."""
    name = type(config).__name__.removesuffix("Config")
    if name in FAMILIES and FAMILIES[name].config_class is type(config):
        return FAMILIES[name]
    return _transformers_model()


def find_model(name: str | Path) -> Path:
    """Return the directory of a model, given a directory, run directory, hub id or short name.

    Raises:
        ConfigError: the model is neither a directory, nor in the cache, nor on the hub.
    """
    name = find_export(name)
    # The table of hub ids imports every family, and is not needed for a path.
    return resolve_model(name, {} if Path(name).exists() else _hub_ids())


def find_base_model(adapter: str | Path) -> Path:
    """Return the directory of the base model of an adapter; see `find_base`."""
    return find_base(Path(adapter), find_model)


def _hub_ids() -> dict[str, str]:
    return {k: v for f in FAMILIES.values() for k, v in f.config_class.hub_ids.items()}


def head_options(
    adapter: str | Path, base: str | Path, backend: Backend = "auto"
) -> dict[str, Any]:
    """Return the options with which to load the base model of an adapter.

    A classifier's adapter contains the head, which the base model may lack.

    Args:
        adapter: adapter directory.
        base: directory of the base model.
        backend: see `AutoModel.family_of`.
    """
    head = head_of_adapter(Path(adapter))
    if head is None or find_config(str(base), backend)[1].head == head[0]:
        return {}
    return {"head": head[0], "num_labels": head[1], "new_head": True}


class AutoModel:
    """Loads checkpoints of any family, selected by `model_type` in config.json."""

    @staticmethod
    def family_of(raw: dict[str, Any], backend: Backend = "auto") -> type[Model]:
        """Return the model class for the contents of a config.json.

        Args:
            raw: contents of config.json.
            backend: "native" for bmforge's families, "transformers" for the transformers
                library, "auto" for a native family if there is one.

        Raises:
            ConfigError: no backend supports the model_type.
            MissingDependencyError: the model needs transformers, which is not installed.
        """
        check_backend(backend)
        changes = raw.get(CHANGES_KEY)
        if backend == "auto" and isinstance(changes, dict):
            backend = changes.get("backend", backend)
        if backend != "transformers":
            for family in FAMILIES.by_similarity(str(raw.get("model_type"))):
                if family.config_class.opens(raw):
                    return family
        kind = str(raw.get("model_type"))
        if backend != "native" and _transformers_library().is_supported_type(kind):
            return _transformers_model()
        raise ConfigError(_describe_unknown(kind, raw, backend))

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        backend: Backend = "auto",
        allow_other_base: bool = False,
        **options: Any,
    ) -> Model:
        """Load a checkpoint, or a base model with an adapter.

        Args:
            name: directory, hub id or short name. For a run directory, its export is loaded. For
                an adapter directory, its base model is loaded, and the frozen adapter is attached.
            backend: see `family_of`.
            allow_other_base: accept an adapter whose base model has changed since its training.
            options: options of `Model.from_pretrained`.
        """
        name = find_export(name)
        if not is_adapter(name):
            family, directory = cls._find(name, backend)
            return family.from_pretrained(directory, **options)
        base = find_base_model(name)
        options = {**head_options(name, base, backend), **options}
        model = cls.from_pretrained(base, backend=backend, **options)
        # `tune` imports `models`, so `models` must not import `tune` at import time.
        tune: Any = importlib.import_module("bmforge.tune.delta")
        tune.load_delta(
            model,
            name,
            allow_other_base=allow_other_base,
            base_fingerprint=partial(fingerprint_of_files, model, base),
            trainable=False,
        )
        return model.eval()

    @classmethod
    def describe_pretrained(
        cls, name: str | Path, *, backend: Backend = "auto", **options: Any
    ) -> tuple[Model, WeightFiles]:
        """Build a checkpoint's model on the meta device; return the model and its weight files.

        Args:
            name: directory, hub id or short name.
            backend: see `family_of`.
            options: options of `Model.describe_pretrained`.

        Raises:
            ConfigError: the directory contains only an adapter.
        """
        name = find_export(name)
        if is_adapter(name):
            raise ConfigError(
                f"{str(name)!r} is an adapter, not a model. Merge it first: bmforge merge {name} "
                "--out DIR."
            )
        family, directory = cls._find(name, backend)
        return family.describe_pretrained(directory, **options)

    @classmethod
    def _find(cls, name: str | Path, backend: Backend) -> tuple[type[Model], Path]:
        directory = find_model(name)
        raw = read_config_file(directory)
        if "model_type" not in raw and (directory / "pytorch_model.pt").is_file():
            raise ConfigError(
                f"{str(name)!r} is in ModelCenter's format. Convert it first: bmforge convert "
                f"{name} DIRECTORY."
            )
        return cls.family_of(raw, backend), directory


def _transformers_model() -> type[Model]:
    """Import and return the model class of the transformers backend."""
    from bmforge.models.transformers import TransformersModel

    return TransformersModel


def _transformers_library() -> ModuleType:
    return importlib.import_module("bmforge.models.transformers.library")


def check_backend(backend: str) -> None:
    """Raise `ConfigError` if the backend does not exist."""
    if backend not in get_args(Backend):
        raise ConfigError(
            f"unknown backend: backend={backend!r} (allowed: {', '.join(get_args(Backend))})."
        )


def _describe_unknown(kind: str, raw: dict[str, Any], backend: str) -> str:
    """Return the error message for an unsupported model_type, with a hint how to load it."""
    configs = [family.config_class for family in FAMILIES.values()]
    native = sorted({t for c in configs for t in c.model_types or (c.family,)})
    if kind in native:
        return (
            f"model_type={kind!r} is a native family, but the other fields of config.json "
            "belong to another architecture. Load it with backend='transformers'."
        )
    if backend == "native":
        hint = suggest(kind, native)
        return (
            f"model_type={kind!r} has no native family.{hint} Leave backend out to load it "
            "with transformers; `bmforge info` lists the native families."
        )
    if "auto_map" in raw:
        return (
            f"model_type={kind!r} needs Python code from the model's directory, which "
            "bmforge does not run. Use a model whose architecture is part of transformers."
        )
    version = _transformers_library().load_library().__version__
    return (
        f"model_type={kind!r} is neither a native family nor an architecture of transformers "
        f"{version}.{suggest(kind, native)} Install a newer transformers, or see "
        "docs/guides/own_models.md for a model of your own."
    )

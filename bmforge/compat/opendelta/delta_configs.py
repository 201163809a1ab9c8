"""Configs of OpenDelta's delta models, as dicts and JSON files."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

from bmforge.errors import ConfigError, suggest
from bmforge.files import replace_file
from bmforge.logging import get_logger

__all__ = [
    "CONFIGS", "AdapterConfig", "BaseDeltaConfig", "BitFitConfig", "CompacterConfig", "LoraConfig",
    "LowRankAdapterConfig", "ParallelAdapterConfig", "PrefixConfig", "SoftPromptConfig",
]  # fmt: skip

CONFIG_NAME = "config.json"
# Fields that all types have: target modules, trained modules, and provenance.
_EVERYWHERE: Mapping[str, Any] = {
    "modified_modules": None,
    "exclude_modules": None,
    "unfrozen_modules": None,
    "common_structure": None,
    "backend": "hf",
    "backbone_class": None,
    "backbone_checkpoint_name": None,
    "backbone_hash": None,
}
# Further fields of OpenDelta's files, which are ignored.
_IGNORED = {"delta_type", "opendelta_version", "transformers_version", "interactive_modify"}


class BaseDeltaConfig:
    """Config of a delta model.

    Args:
        values: values of fields, as keyword arguments; missing fields have their defaults.

    Attributes:
        delta_type: type of the delta model.
        fields: fields of this type, with their defaults.
        fixed: fields of which only the default value is supported.
        aliases: other names of fields.

    Raises:
        ConfigError: a field is unknown, or its value is not supported.
    """

    delta_type: ClassVar[str] = ""
    fields: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    fixed: ClassVar[frozenset[str]] = frozenset()
    aliases: ClassVar[Mapping[str, str]] = MappingProxyType({"modified_keys": "modified_modules"})
    modified_modules: Sequence[str] | None
    exclude_modules: Sequence[str] | None
    unfrozen_modules: Sequence[str] | None
    common_structure: bool | None
    backbone_class: str | None
    backbone_checkpoint_name: str | None

    def __init__(self, **values: Any) -> None:
        defaults = {**_EVERYWHERE, **self.fields}
        renamed = {self.aliases.get(name, name): value for name, value in values.items()}
        for name, value in renamed.items():
            if name not in defaults:
                raise ConfigError(
                    f"{type(self).__name__} has no field {name!r} (fields: "
                    f"{', '.join(defaults)}).{suggest(name, defaults)}"
                )
            if name in self.fixed and value != self.fields[name]:
                raise ConfigError(
                    f"{name}={value!r} of {type(self).__name__} is not supported "
                    f"(supported: {self.fields[name]!r}). Leave it out."
                )
        self.__dict__.update({**defaults, **renamed})

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, and the type of the delta model."""
        return {"delta_type": self.delta_type, **self.__dict__}

    def to_json_string(self, use_diff: bool = True) -> str:
        """Return the fields as JSON, by default only those that differ from the defaults."""
        usual = {**_EVERYWHERE, **self.fields}
        shown = {n: v for n, v in self.to_dict().items() if not use_diff or v != usual.get(n)}
        return json.dumps(shown, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], **kwargs: Any) -> Self:
        """Create a config with the given fields; unknown fields are ignored with a warning."""
        names = {*_EVERYWHERE, *cls.fields, *cls.aliases}
        all_values = {**config_dict, **kwargs}
        left = sorted(name for name in all_values if name not in names | _IGNORED)
        if left:
            get_logger().warning("%s ignores the unknown fields %s", cls.__name__, ", ".join(left))
        return cls(**{name: value for name, value in all_values.items() if name in names})

    @classmethod
    def from_finetuned(cls, finetuned_delta_path: str | Path, **kwargs: Any) -> Self:
        """Read the config in the directory of a saved delta model."""
        return cls.from_dict(read_config(finetuned_delta_path), **kwargs)

    def save_finetuned(self, save_directory: str | Path) -> None:
        """Write `config.json` to a directory, which is created if missing."""
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        replace_file(Path(save_directory) / CONFIG_NAME, self.to_json_string(use_diff=False))

    def __eq__(self, other: object) -> bool:
        """Compare the fields of two configs."""
        return type(other) is type(self) and other.__dict__ == self.__dict__

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Show the fields that differ from the defaults."""
        return f"{type(self).__name__} {self.to_json_string()}"


def read_config(directory: str | Path) -> dict[str, Any]:
    """Read the fields in the `config.json` of a directory.

    Raises:
        ConfigError: the file is missing, or is not a config.
    """
    file = Path(directory) / CONFIG_NAME
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{str(directory)!r} has no readable {CONFIG_NAME} ({error}). Deltas are loaded "
            "from directories only: DeltaCenter, from which OpenDelta downloaded deltas by name, "
            "no longer exists."
        ) from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{str(file)!r} must contain a JSON object of config fields.")
    return fields


def _define(name: str, delta_type: str) -> type[BaseDeltaConfig]:
    """Create the config class of a type from its table in `delta_configs.toml`."""
    table = _TABLES[delta_type]
    fields = {**table.get("fields", {}), **dict.fromkeys(table.get("unset", ()))}
    attributes = {
        "__doc__": f"Config of `{name.removesuffix('Config')}Model`.",
        "__module__": __name__,
        "delta_type": delta_type,
        "fields": MappingProxyType(fields),
        "fixed": frozenset(table.get("fixed", ())),
        "aliases": MappingProxyType({**table.get("aliases", {}), **BaseDeltaConfig.aliases}),
    }
    return type(name, (BaseDeltaConfig,), attributes)


_TABLES = tomllib.loads(Path(__file__).with_name("delta_configs.toml").read_text("utf-8"))
LoraConfig = _define("LoraConfig", "lora")
AdapterConfig = _define("AdapterConfig", "adapter")
LowRankAdapterConfig = _define("LowRankAdapterConfig", "low_rank_adapter")
CompacterConfig = _define("CompacterConfig", "compacter")
ParallelAdapterConfig = _define("ParallelAdapterConfig", "parallel_adapter")
BitFitConfig = _define("BitFitConfig", "bitfit")
PrefixConfig = _define("PrefixConfig", "prefix")
SoftPromptConfig = _define("SoftPromptConfig", "soft_prompt")
CONFIGS: Mapping[str, type[BaseDeltaConfig]] = {
    kind.delta_type: kind for kind in BaseDeltaConfig.__subclasses__()
}

"""Configs of OpenDelta's delta models, as dicts and JSON files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

from bmforge.errors import ConfigError, suggest
from bmforge.files import replace_file
from bmforge.logging import get_logger

__all__ = [
    "CONFIGS",
    "AdapterConfig",
    "BaseDeltaConfig",
    "BitFitConfig",
    "CompacterConfig",
    "LoraConfig",
    "LowRankAdapterConfig",
    "ParallelAdapterConfig",
    "PrefixConfig",
    "SoftPromptConfig",
]

CONFIG_NAME = "config.json"
# Fields of all types: target modules, trained modules, and provenance.
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
        values: values by field name; missing fields have their defaults.

    Attributes:
        delta_type: type of the delta model.
        fields: fields of this type, with their defaults.
        fixed: fields that support only their default here.
        aliases: other names of fields.

    Raises:
        ConfigError: an unknown field, or an unsupported value.
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
                    f"(supported: {self.fields[name]!r})."
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
            get_logger().warning("%s has no fields %s", cls.__name__, ", ".join(left))
        return cls(**{name: value for name, value in all_values.items() if name in names})

    @classmethod
    def from_finetuned(cls, finetuned_delta_path: str | Path, **kwargs: Any) -> Self:
        """Read the config in the directory of a saved delta model."""
        return cls.from_dict(read_config(finetuned_delta_path), **kwargs)

    def save_finetuned(self, save_directory: str | Path) -> None:
        """Write `config.json` into a directory."""
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
            "from directories; DeltaCenter, from which OpenDelta loaded names, no longer "
            "exists."
        ) from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{str(file)!r} is not a mapping of config fields.")
    return fields


class LoraConfig(BaseDeltaConfig):
    """Config of `LoraModel`."""

    delta_type = "lora"
    fields = MappingProxyType({"lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.0})
    aliases = MappingProxyType({"rank": "lora_r", "alpha": "lora_alpha", **BaseDeltaConfig.aliases})


class AdapterConfig(BaseDeltaConfig):
    """Config of `AdapterModel`."""

    delta_type = "adapter"
    fields = MappingProxyType({"bottleneck_dim": 24, "non_linearity": "gelu_new"})


class LowRankAdapterConfig(BaseDeltaConfig):
    """Config of `LowRankAdapterModel`."""

    delta_type = "low_rank_adapter"
    fields = MappingProxyType(
        {
            "reduction_factor": 32,
            "low_rank_rank": 1,
            "low_rank_w_init": "glorot-uniform",
            "non_linearity": "gelu_new",
        }
    )
    fixed = frozenset({"low_rank_w_init"})


class CompacterConfig(BaseDeltaConfig):
    """Config of `CompacterModel`."""

    delta_type = "compacter"
    fields = MappingProxyType(
        {
            "reduction_factor": 16,
            "non_linearity": "gelu_new",
            "hypercomplex_division": 4,
            "phm_rank": 1,
            "factorized_phm": True,
            "phm_c_init": "normal",
            "phm_init_range": 0.0001,
            "learn_phm": True,
            "hypercomplex_nonlinearity": "glorot-uniform",
            "shared_phm_rule": False,
            "shared_W_phm": False,
            "factorized_phm_rule": False,
            "kronecker_prod": None,
            "bottleneck_dim": None,
            "use_bias_up_sampler": True,
            "use_bias_down_sampler": True,
        }
    )
    fixed = frozenset(fields) - {
        *("reduction_factor", "non_linearity", "hypercomplex_division", "phm_rank"),
        "factorized_phm",
    }


class ParallelAdapterConfig(BaseDeltaConfig):
    """Config of `ParallelAdapterModel`."""

    delta_type = "parallel_adapter"
    fields = MappingProxyType({"bottleneck_dim": 24, "non_linearity": "gelu_new", "scaled": 1.0})


class BitFitConfig(BaseDeltaConfig):
    """Config of `BitFitModel`."""

    delta_type = "bitfit"


class PrefixConfig(BaseDeltaConfig):
    """Config of `PrefixModel`."""

    delta_type = "prefix"
    fields = MappingProxyType(
        {"prefix_token_num": 6, "reparameterize": True, "embed_dim": 512, "mid_dim": 512}
    )


class SoftPromptConfig(BaseDeltaConfig):
    """Config of `SoftPromptModel`."""

    delta_type = "soft_prompt"
    fields = MappingProxyType(
        {
            "soft_token_num": 100,
            "init_range": 0.5,
            "token_init": True,
            "other_expand_ids": {"attention_mask": 1, "token_type_ids": 0},
        }
    )
    fixed = frozenset({"other_expand_ids"})


CONFIGS: Mapping[str, type[BaseDeltaConfig]] = {
    kind.delta_type: kind
    for kind in (
        LoraConfig,
        AdapterConfig,
        LowRankAdapterConfig,
        CompacterConfig,
        ParallelAdapterConfig,
        BitFitConfig,
        PrefixConfig,
        SoftPromptConfig,
    )
}

"""Configs with ModelCenter's field names, which wrap bmforge's configs; one class per family.

A field can be read and set by its ModelCenter name (`dim_model`) or by bmforge's (`hidden_size`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from bmforge.compat.model_center.model.relative_cpm1 import RelativeCPM1
from bmforge.errors import ConfigError, suggest
from bmforge.files import read_json
from bmforge.models import Model, ModelConfig
from bmforge.models.config import read_config_file
from bmforge.models.formats.model_center import is_model_center
from bmforge.models.formats.model_center_config import OLD_FAMILIES, OLD_FIELDS, read_old_config
from bmforge.models.hub import FAMILIES
from bmforge.models.resolve import resolve_model

__all__ = [
    "OLD_NAMES", "Config", "BertConfig", "CPM1Config", "CPM2Config", "CPM3Config", "GLMConfig",
    "GPT2Config", "GPTjConfig", "LlamaConfig", "LongformerConfig", "OPTConfig", "RobertaConfig",
    "T5Config", "ViTConfig", "VitConfig",
]  # fmt: skip

# Maps ModelCenter's field names to bmforge's.
OLD_NAMES: Mapping[str, str] = {
    **OLD_FIELDS,
    "tied": "tie_word_embeddings",
    "ffn_activate_fn": "activation",
}
# Further fields of ModelCenter's configs, with their defaults. Only `dtype` and `cls_head` have an
# effect here.
_KEPT: Mapping[str, Any] = {
    **{f"{part}_init_mean": 0.0 for part in ("emb", "pos", "att", "ffn", "proj")},
    **{"emb_init_std": 0.02, "pos_init_std": 0.02, "att_init_std": 0.02, "ffn_init_std": 0.02},
    **{"proj_init_std": 1.0, "norm_init_var": 1.0, "proj_bias": True, "att_mask_value": -1e4},
    **{"int8": False, "use_cache": False, "cls_head": None, "scale": None, "length_scale": False},
    "dropout_p": 0.0,
}
_DROPOUTS = ("dropout", "attn_dropout", "embed_dropout")
_GATES = {"gated_silu": "silu", "gated_gelu": "gelu", "gated_relu": "relu"}


class Config:
    """Model config with ModelCenter's field names.

    Args:
        fields: values of fields, as keyword arguments; the defaults are ModelCenter's, or bmforge's
            for newer families. `half` or `dtype` set the parameter dtype (default: fp32).

    Raises:
        ConfigError: a field is unknown, or the family does not support a value.
    """

    family: ClassVar[str] = ""
    # Fields that must have these values, which are also their defaults.
    fixed: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, **fields: Any) -> None:
        self._start({}, None)
        for name, value in fields.items():
            setattr(self, name, value)
        self.native()  # raises an error for invalid fields

    def kind(self) -> type[Model]:
        """Return the bmforge model class for this config."""
        return FAMILIES[self.family]

    def needed(self) -> Mapping[str, Any]:
        """Return a dict from field to value, for fields that support only one value."""
        old = OLD_FAMILIES.get(self.family)
        return {**(old.needed if old else {}), **self.fixed}

    def _start(self, values: dict[str, Any], base: ModelConfig | None) -> None:
        self.__dict__.update(_given=values, _base=base, _native=None, dtype=torch.float32)

    @classmethod
    def from_pretrained(cls, name: str | Path, **fields: Any) -> Self:
        """Read the config of a directory, a cached model, or a model on the hub.

        Args:
            name: directory or id, whose config.json has Hugging Face's or ModelCenter's format.
            fields: fields to replace.
        """
        family = FAMILIES[cls.family].config_class
        directory = resolve_model(name, family.hub_ids)
        raw = read_config_file(directory)
        if is_model_center(directory) or not family.opens(raw):
            return cls(**{**raw, **fields})
        native = family.from_hf(raw)
        old = OLD_FAMILIES.get(cls.family)
        if old is not None and cls.family != "OPT" and hasattr(native, "dropout"):
            # ModelCenter's converters write the dropout only for OPT, so the default applies.
            fields = {"dropout_p": old.defaults.get("dropout_p", 0.0), **fields}
        return cls.over(native, **fields)

    @classmethod
    def from_json_file(cls, json_file: str | Path, **fields: Any) -> Self:
        """Read a file with ModelCenter's fields; `fields` override some of them."""
        return cls(**{**cls._dict_from_json_file(json_file), **fields})

    @classmethod
    def over(cls, native: ModelConfig, **fields: Any) -> Self:
        """Wrap a bmforge config, changing some fields."""
        config = cls.__new__(cls)
        config._start({}, native)
        for name, value in fields.items():
            setattr(config, name, value)
        return config

    @staticmethod
    def _dict_from_json_file(json_file: str | Path) -> dict[str, Any]:
        return read_json(Path(json_file))

    def native(self) -> ModelConfig:
        """Return the bmforge config with the current field values, without a head."""
        if self._native is None:
            self.__dict__["_native"] = self._make()
        config: ModelConfig = self._native
        return config

    def _make(self) -> ModelConfig:
        family = self.kind().config_class
        field_names = {f.name for f in fields(family) if f.init}
        if self._base is not None or self.family not in OLD_FAMILIES:
            changes = self._translate(field_names, self._given)
            return family(**changes) if self._base is None else self._base.replace(**changes)
        old = {name: value for name, value in self._given.items() if self._is_old(name)}
        values = read_old_config(self.family, old, {})
        values |= self._translate(
            field_names, {n: v for n, v in self._given.items() if n not in old}
        )
        values.pop("head", None)
        return family(**{name: value for name, value in values.items() if name in field_names})

    def _is_old(self, name: str) -> bool:
        return name in OLD_NAMES or name in _KEPT or name in self.needed()

    def _translate(self, field_names: set[str], values: Mapping[str, Any]) -> dict[str, Any]:
        """Rename fields to bmforge's names; fields that the family lacks are omitted."""
        changes: dict[str, Any] = {}
        for name, value in values.items():
            own_name = OLD_NAMES.get(name, name)
            if name == "position_size" and self._base is not None:
                value -= _count_rest(self._base)
            elif name == "ffn_activate_fn":
                value = _GATES.get(value, value)
            elif name == "num_heads_kv":
                value = max(0, value)
            elif name in ("dropout_p", "drop"):
                changes |= {part: value for part in _DROPOUTS if part in field_names}
            elif own_name == "windows" and isinstance(value, int):
                value = (value,)
            if own_name in field_names:
                changes[own_name] = value
        return changes

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "half":
            self.__dict__["dtype"] = torch.half if value else torch.float32
        elif name == "dtype":
            self.__dict__["dtype"] = getattr(torch, str(value).removeprefix("torch."))
        else:
            self._check(name, value)
            self._given[name] = value
            self.__dict__["_native"] = None

    def _check(self, name: str, value: Any) -> None:
        family, needed = self.kind().config_class, self.needed()
        old = OLD_FAMILIES.get(self.family)
        field_names = {*OLD_NAMES, *_KEPT, *(f.name for f in fields(family)), "model_type", *needed}
        field_names |= {*old.defaults} if old else set()
        if name not in field_names:
            raise ConfigError(
                f"{type(self).__name__} has no field {name!r}.{suggest(name, field_names)}"
            )
        has_dropout = any(f.name == "dropout" for f in fields(family))
        if name in ("dropout_p", "drop") and value and not has_dropout:
            raise ConfigError(
                f"{name}={value!r} is not supported, because {self.family} has no dropout. "
                f"Set {name} to 0."
            )
        if needed.get(name, value) not in (value, None):
            raise ConfigError(
                f"{name}={value!r} is not supported by {self.family} (supported: "
                f"{needed[name]!r}). Leave the field out."
            )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_given" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name == "half":
            return self.dtype == torch.half
        if name in self._given:
            return self._given[name]
        native, old = self.native(), OLD_FAMILIES.get(self.family)
        own_name = OLD_NAMES.get(name, name)
        if name == "position_size":
            return native.max_seq_len + _count_rest(native)
        if name == "ffn_activate_fn" and old:
            own_name = getattr(native, "feed_forward", "") or getattr(native, "activation", "")
            return next((a for a, b in old.activations.items() if a and b == own_name), own_name)
        if hasattr(native, own_name):
            return getattr(native, own_name)
        for table in (self.needed(), old.defaults if old else {}, _KEPT):
            if name in table:
                return table[name]
        raise AttributeError(f"{type(self).__name__} has no field {name!r}.")

    def to_dict(self) -> dict[str, Any]:
        """Return the family's fields under ModelCenter's names, as JSON values."""
        field_names = {f.name for f in fields(self.kind().config_class)}
        of_images = {"img_size", "channels_in", "num_classes", "mlp_size", "drop"}
        left_out = {"dim_ff", "dropout_p"} if self.family == "ViT" else of_images
        if "num_decoder_layers" not in field_names:
            left_out.add("num_encoder_layers")
        names = [
            old
            for old, own_name in OLD_NAMES.items()
            if own_name in field_names and old not in left_out
        ]
        names += [name for name in self._given if name not in names]
        return {**{name: getattr(self, name) for name in names}, "half": self.half}

    def to_json_string(self) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"

    def to_json_file(self, json_file_path: str | Path) -> None:
        """Write the fields to a file that `from_json_file` reads."""
        Path(json_file_path).write_text(self.to_json_string(), encoding="utf-8")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.to_json_string()})"


def _count_rest(native: ModelConfig) -> int:
    """Return the number of rows of the position table that do not encode a position."""
    return 1 if native.family == "glm" else int(getattr(native, "position_offset", 0))


def _define(name: str, family: str) -> type[Config]:
    """Create the config class of a family, for families without special fields."""
    doc = f"Config of a {family} model."
    return type(
        f"{name}Config", (Config,), {"__doc__": doc, "__module__": __name__, "family": family}
    )


BertConfig = _define("Bert", "Bert")
RobertaConfig = _define("Roberta", "Roberta")
LongformerConfig = _define("Longformer", "Longformer")
ViTConfig = VitConfig = _define("ViT", "ViT")
GPT2Config = _define("GPT2", "GPT2")
GPTjConfig = _define("GPTj", "GPTJ")
OPTConfig = _define("OPT", "OPT")
LlamaConfig = _define("Llama", "Llama")
GLMConfig = _define("GLM", "GLM")
T5Config = _define("T5", "T5")
CPM2Config = _define("CPM2", "CPM2")


class CPM1Config(Config):
    """Config of a CPM-1 model.

    `pos_bias_type` selects the model: "relative" (default) is ModelCenter's variant with relative
    positions; "none" is the original GPT-2 model, which `from_pretrained` also detects.
    """

    family = "CPM1"

    def __init__(self, **fields: Any) -> None:
        kind = {n: fields.pop(n) for n in ("pos_bias_type",) if n in fields}
        super().__init__(**kind, **fields)

    @property
    def is_relative(self) -> bool:
        """True for ModelCenter's variant of CPM-1 with relative positions."""
        return self._base is None and self._given.get("pos_bias_type", "relative") == "relative"

    def kind(self) -> type[Model]:
        """Return the bmforge model class for this config."""
        return RelativeCPM1 if self.is_relative else FAMILIES["CPM1"]

    def needed(self) -> Mapping[str, Any]:
        """Return a dict from field to value, for fields that support only one value."""
        biases = ("norm_bias", "att_bias", "ffn_bias", "attn_scale")
        return {
            "pos_bias_type": "relative" if self.is_relative else "none",
            "ffn_activate_fn": "gated_gelu" if self.is_relative else "gelu_new",
            **dict.fromkeys(biases, not self.is_relative),
            **dict.fromkeys(("length_scale", "int8", "post_layer_norm"), False),
        }

    def _check(self, name: str, value: Any) -> None:
        if name != "pos_bias_type":
            return super()._check(name, value)
        if value not in (("none",) if self._base is not None else ("relative", "none")):
            raise ConfigError(
                f"pos_bias_type={value!r} is unknown (supported: 'relative', ModelCenter's "
                "default, and 'none', that of the released model). Use the type of the "
                "checkpoint."
            )


class CPM3Config(Config):
    """Config of a CPM-3 model, whose architecture is CPM-Ant's."""

    family = "CPMAnt"
    fixed: ClassVar[Mapping[str, Any]] = {
        **dict.fromkeys(("norm_bias", "att_bias", "ffn_bias", "int8", "post_layer_norm"), False),
        **{"length_scale": True, "attn_scale": True, "pos_bias_type": "relative"},
        **{"max_exact_rate": 0.25, "max_distance_rate": 1.0, "absolute_inner_segment": True},
        "ffn_activate_fn": "gated_gelu",
    }

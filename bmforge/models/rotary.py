"""RoPE fields in configs: conversion from and to transformers' formats, and a base class."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bmforge.errors import ConfigError
from bmforge.models.config import ModelConfig
from bmforge.nn import RopeSpec

__all__ = ["RotaryConfig", "rope_from_hf", "rope_to_hf"]

# transformers' name of a rotary parameter -> name in `RopeSpec`.
_ROPE_NAMES = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_seq_len",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "truncate",
    "short_factor": "short_factor",
    "long_factor": "long_factor",
}


def rope_from_hf(raw: dict[str, Any]) -> dict[str, Any]:
    """Convert the rotary fields of a transformers config (old or new format).

    Args:
        raw: contents of config.json; the rotary fields are removed.

    Returns:
        `rope_theta` and `rope_scaling` (a dict with `kind` and `RopeSpec`'s field names, or empty)

    Raises:
        ConfigError: the scaling kind or a parameter is not supported.
    """
    parameters = dict(raw.pop("rope_parameters", None) or raw.pop("rope_scaling", None) or {})
    raw.pop("rope_scaling", None)
    theta = parameters.pop("rope_theta", None) or raw.pop("rope_theta", None) or 10000.0
    raw.pop("rope_theta", None)
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    for fields in (raw, parameters):
        if fields.get("partial_rotary_factor") == 1.0:  # equivalent to an absent field
            del fields["partial_rotary_factor"]
    unknown = [name for name in parameters if name not in _ROPE_NAMES]
    if unknown:
        raise ConfigError(
            f"rotary scaling {kind!r} has unsupported parameters: {', '.join(unknown)} "
            f"(supported: {', '.join(_ROPE_NAMES)}). Correct rope_scaling in config.json."
        )
    scaling = {_ROPE_NAMES[n]: v for n, v in parameters.items() if v is not None}
    return {
        "rope_theta": float(theta),
        "rope_scaling": {} if kind == "default" else {"kind": kind, **scaling},
    }


def rope_to_hf(theta: float, scaling: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary fields in the format that transformers 4 and 5 both read."""
    published_names = {own: published for published, own in _ROPE_NAMES.items()}
    numbers = {published_names[n]: v for n, v in scaling.items() if n != "kind"}
    return {
        "rope_theta": theta,
        "rope_scaling": {"rope_type": scaling["kind"], **numbers} if scaling else None,
    }


@dataclass(kw_only=True)
class RotaryConfig(ModelConfig):
    """Config fields of all families that use RoPE.

    Args:
        rope_theta: base of the rotary frequencies.
        rope_scaling: `kind` and parameters of `nn.RopeSpec`; empty for no scaling.
    """

    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raise `ConfigError` for invalid rotary or other fields."""
        super().check()
        self.rope_spec()

    @property
    def pretraining_length(self) -> int:
        """Default of `original_seq_len`, the context length before RoPE scaling."""
        return self.max_seq_len

    def rope_spec(self, rotary_dim: int = 0, interleaved: bool = False) -> RopeSpec:
        """Return the `RopeSpec` that the fields describe.

        Args:
            rotary_dim: number of rotated head dims; 0 means all.
            interleaved: pair adjacent dims instead of the two halves.
        """
        numbers: dict[str, Any] = {
            n: tuple(v) if isinstance(v, list) else v for n, v in self.rope_scaling.items()
        }
        kind = numbers.get("kind")
        if kind in ("yarn", "llama3", "longrope"):
            numbers.setdefault("original_seq_len", self.pretraining_length)
        if kind in ("yarn", "longrope"):
            numbers.setdefault("factor", self.max_seq_len / numbers["original_seq_len"])
        elif kind and "factor" not in numbers:
            raise ConfigError(
                f"rotary scaling {kind!r} needs the parameter factor, but has only {numbers}. "
                "Add factor to rope_scaling in config.json."
            )
        return RopeSpec(
            rotary_dim or self.head_dim,
            self.rope_theta,
            max_seq_len=self.max_seq_len,
            interleaved=interleaved,
            **numbers,
        )

    @classmethod
    def _read_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return rope_from_hf(raw), raw

    def _write_special(self) -> dict[str, Any]:
        return {**rope_to_hf(self.rope_theta, self.rope_scaling), "rope_parameters": None}

    def to_hf(self) -> dict[str, Any]:
        """Return the contents of config.json, without the newer field `rope_parameters`.

        The rotary fields are written as `rope_theta` and `rope_scaling`, which all versions of
        transformers read.
        """
        out = super().to_hf()
        return {name: value for name, value in out.items() if name != "rope_parameters"}

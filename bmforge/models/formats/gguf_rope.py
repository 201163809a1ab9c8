"""Reads and writes RoPE scaling in GGUF files: metadata keys, and factors stored as tensors.

Source: llama.cpp's ``convert_hf_to_gguf.py`` (rope_freqs of Llama 3, rope_factors_* of longrope).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bmforge.errors import CheckpointError, ConfigError
from bmforge.gguf_header import GgufHeader

__all__ = ["read_rope", "write_rope"]

_CLOSE = 1e-5
# Values of all published Llama 3 models with scaling; GGUF stores only the resulting factors.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read_rope(header: GgufHeader, kind: str, head_dim: int) -> tuple[dict[str, Any], set[str]]:
    """Return config.json's rotary fields, and the metadata keys from which they are derived.

    No config field expresses the effect of other "rope." keys on llama.cpp's outputs.

    Args:
        header: header of the file.
        kind: architecture of the file.
        head_dim: number of rotary dims.

    Returns:
        config fields; metadata keys without the architecture's name

    Raises:
        CheckpointError: the scaling type is not supported, or a value is not a number.
    """
    prefix = f"{kind}.rope."
    values = {
        key.removeprefix(prefix): value
        for key, value in header.metadata.items()
        if key.startswith(prefix)
    }
    theta = float(_number(header, values, "freq_base", 10000.0))
    fields, read = _read_scaling(header, kind, values, theta, head_dim)
    neutral = {key for key, value in _NEUTRAL.items() if values.get(key, value) == value}
    keys = {f"rope.{key}" for key in ("freq_base", "scaling.type", *read, *neutral)}
    return {"rope_theta": theta, "rope_scaling": fields}, keys


# Metadata key -> value that has no effect in llama.cpp.
_NEUTRAL = {
    "scaling.factor": 1.0,
    "scaling.attn_factor": 1.0,
    "scaling.yarn_ext_factor": 1.0,
    "scaling.yarn_attn_factor": 1.0,
    "scaling.yarn_log_multiplier": 0.0,
}
_ORIGINAL = "scaling.original_context_length"
# Keys that llama.cpp reads only for YaRN.
_YARN = (_ORIGINAL, "scaling.yarn_beta_fast", "scaling.yarn_beta_slow")


def _read_scaling(
    header: GgufHeader, kind: str, values: dict[str, Any], theta: float, head_dim: int
) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """Return config.json's rope_scaling, and the keys after "rope." from which it is derived."""
    # llama.cpp treats a factor without a type as linear scaling.
    name = str(values.get("scaling.type", "linear" if "scaling.factor" in values else "none"))
    fields: dict[str, Any]
    frequencies = _factors(header, "rope_freqs.weight", head_dim)
    short = _factors(header, "rope_factors_short.weight", head_dim)
    if name not in ("none", "linear", "yarn", "longrope") or (name == "longrope" and short is None):
        raise CheckpointError(
            f"{str(header.path)!r} has the rotary scaling {name!r}, which is not supported "
            "(supported: none, linear, yarn, longrope). Convert the model from its original files."
        )
    if frequencies is not None:
        return _from_frequencies(frequencies, theta, header, kind), _YARN
    if short is not None:
        attention = _number(header, values, "scaling.attn_factor", 1.0)
        long = _factors(header, "rope_factors_long.weight", head_dim)
        fields = {"rope_type": "longrope", "short_factor": short, "long_factor": long or short}
        fields |= {
            "attention_factor": float(attention),
            "original_max_position_embeddings": _number(header, values, _ORIGINAL, 0) or None,
        }
        return fields, (*_YARN, "scaling.attn_factor")
    if name == "none":
        return None, (*_YARN, "scaling.factor")
    factor = float(_number(header, values, "scaling.factor", 1.0)) or 1.0
    if name == "linear":
        return {"rope_type": "linear", "factor": factor}, (*_YARN, "scaling.factor")
    fields = {"rope_type": "yarn", "factor": factor}
    fields["original_max_position_embeddings"] = _number(header, values, _ORIGINAL, 0) or None
    for beta in ("beta_fast", "beta_slow"):
        if f"scaling.yarn_{beta}" in values:
            fields[beta] = _number(header, values, f"scaling.yarn_{beta}", 0.0)
    if "scaling.attn_factor" in values:
        # llama.cpp multiplies YaRN's own factor on cos and sin by this value.
        own = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        fields["attention_factor"] = own * _number(header, values, "scaling.attn_factor", 1.0)
    return fields, (*_YARN, "scaling.factor", "scaling.attn_factor")


def _number(header: GgufHeader, numbers: dict[str, Any], key: str, default: float) -> Any:
    value = numbers.get(key, default)
    if isinstance(value, int | float) and math.isfinite(value) and value >= 0:
        return value
    raise CheckpointError(
        f"{str(header.path)!r} has rope.{key}={value!r} (expected: a number of at least 0). "
        "Convert the model from its original files."
    )


def _factors(header: GgufHeader, name: str, head_dim: int) -> list[float] | None:
    """Return the frequency factors in a tensor of the file; None if the file lacks the tensor."""
    entry = header.tensors.get(name)
    if entry is None:
        return None
    if entry.kind != "F32" or entry.shape != (head_dim // 2,):
        raise CheckpointError(
            f"{name} in {str(header.path)!r} has the shape {entry.shape} and the type {entry.kind} "
            f"(expected: {(head_dim // 2,)} and F32). Convert the model from its original files."
        )
    with (entry.path or header.path).open("rb") as file:
        file.seek(entry.start)
        data = bytearray(file.read(entry.size))
    if len(data) != entry.size:
        raise CheckpointError(f"{str(header.path)!r} ends too early. Download the file again.")
    return torch.frombuffer(data, dtype=torch.float32).tolist()


def _from_frequencies(
    factors: list[float], theta: float, header: GgufHeader, kind: str
) -> dict[str, Any]:
    """Return the `rope_scaling` for frequency factors: Llama 3's if they match, else longrope."""
    llama3 = {"rope_type": "llama3", "factor": max(factors), **_LLAMA3}
    expected = llama3_factors(2 * len(factors), theta, llama3)
    if torch.allclose(torch.tensor(factors), expected, rtol=_CLOSE, atol=0.0):
        return llama3
    length = header.metadata.get(f"{kind}.context_length", 1)
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": length,
    }


def llama3_factors(head_dim: int, theta: float, scaling: dict[str, Any]) -> Tensor:
    """Return the factors by which Llama 3's scaling divides the rotary frequencies.

    Args:
        head_dim: number of rotary dims.
        theta: base of the frequencies.
        scaling: rope scaling fields of config.json.

    Shape:
        returns (head_dim / 2,) in fp32
    """
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    turns = scaling["original_max_position_embeddings"] / (2 * math.pi / plain)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return 1.0 / ((1 - smooth) / scaling["factor"] + smooth)


def write_rope(raw: dict[str, Any], head_dim: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return metadata (keys without the architecture) and tensors for config.json's RoPE fields.

    Raises:
        ConfigError: GGUF cannot represent the scaling.
    """
    keys: dict[str, Any] = {"rope.freq_base": float(raw["rope_theta"])}
    scaling = raw.get("rope_scaling")
    if not scaling:
        return keys, {}
    kind = scaling["rope_type"]
    if kind == "llama3":
        return keys, {"rope_freqs.weight": llama3_factors(head_dim, raw["rope_theta"], scaling)}
    if kind not in ("linear", "yarn", "longrope"):
        raise ConfigError(
            f"GGUF does not support the rotary scaling {kind!r} (supported: linear, llama3, yarn, "
            "longrope). Keep the model in the Hugging Face format."
        )
    keys["rope.scaling.type"] = kind
    original = scaling.get("original_max_position_embeddings")
    if original and kind != "linear":
        keys["rope.scaling.original_context_length"] = int(original)
    if kind != "longrope":
        keys["rope.scaling.factor"] = float(scaling["factor"])
        betas = (n for n in ("beta_fast", "beta_slow") if n in scaling)
        return {**keys, **{f"rope.scaling.yarn_{n}": float(scaling[n]) for n in betas}}, {}
    keys["rope.scaling.attn_factor"] = _attention_factor(raw, scaling)
    tensors = {
        f"rope_factors_{name}.weight": torch.tensor(scaling[f"{name}_factor"])
        for name in ("short", "long")
    }
    return keys, tensors


def _attention_factor(raw: dict[str, Any], scaling: dict[str, Any]) -> float:
    """Return longrope's factor on cos and sin, which GGUF stores explicitly."""
    longest = raw["max_position_embeddings"]
    original = scaling.get("original_max_position_embeddings") or longest
    factor = scaling.get("factor") or longest / original
    set_factor = scaling.get("attention_factor")
    if set_factor is not None or factor <= 1:
        return float(1.0 if set_factor is None else set_factor)
    return math.sqrt(1 + math.log(factor) / math.log(original))

"""Rotary position embeddings (RoPE) and their scaling methods.

Nothing is stored: frequencies are computed from the config, and cosines from the positions. A model
therefore has no buffers to initialize, even if it is on the meta device, sharded or pipelined.

Source: Su et al., "RoFormer" (2021). Scalings: linear (kaiokendev 2023), dynamic NTK (bloc97,
emozilla 2023), YaRN (Peng et al. 2023), llama3 (Meta 2024), longrope (Ding et al. 2024).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from bmforge.errors import ConfigError, suggest
from bmforge.nn.device_kernels import can_use_device_kernels
from bmforge.nn.plain_rows import plain_rotate

__all__ = [
    "RopeKind",
    "RopeSpec",
    "apply_rope",
    "narrow_rope",
    "invalidates_keys",
    "rope_frequencies",
    "rope_table",
]

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]


@dataclass(frozen=True)
class RopeSpec:
    """Parameters of a rotary position embedding.

    Args:
        rotary_dim: number of rotated head dims (even).
        theta: base of the frequencies.
        kind: scaling method.
        factor: ratio of the extended to the original context length.
        max_seq_len: maximum sequence length of the model as configured.
        original_seq_len: maximum sequence length before scaling (yarn, llama3, longrope).
        low_freq_factor: parameter of the "llama3" scaling.
        high_freq_factor: parameter of the "llama3" scaling.
        beta_fast: parameter of the "yarn" scaling.
        beta_slow: parameter of the "yarn" scaling.
        truncate: round the correction range of "yarn" to whole dims.
        attention_factor: factor on cos and sin; None means the scaling method's own rule.
        mscale: parameter of the "yarn" scaling.
        mscale_all_dim: parameter of the "yarn" scaling.
        short_factor: divisors of the frequencies up to the original length ("longrope").
        long_factor: divisors of the frequencies beyond the original length ("longrope").
        interleaved: pair adjacent dims (GPT-J) instead of the two halves (Llama).
    """

    rotary_dim: int
    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    max_seq_len: int = 2048
    original_seq_len: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    interleaved: bool = False

    def __post_init__(self) -> None:
        """Raise `ConfigError` for values that would silently give wrong results."""
        kinds = get_args(RopeKind)
        if self.kind not in kinds:
            raise ConfigError(
                f"unknown rotary kind {self.kind!r} (supported: "
                f"{', '.join(kinds)}).{suggest(self.kind, kinds)}"
            )
        if self.rotary_dim % 2:
            raise ConfigError(
                f"rotary_dim={self.rotary_dim} must be even, because dimensions are rotated in "
                "pairs."
            )
        if self.kind in ("yarn", "llama3", "longrope") and not self.original_seq_len:
            raise ConfigError(
                f"rotary kind {self.kind!r} needs original_seq_len. Set original_seq_len to the "
                "sequence length of the original model."
            )
        for name in ("short_factor", "long_factor") if self.kind == "longrope" else ():
            if len(getattr(self, name)) != self.rotary_dim // 2:
                raise ConfigError(
                    f"{name} has {len(getattr(self, name))} entries (expected with longrope: "
                    f"rotary_dim / 2 = {self.rotary_dim // 2})."
                )


def rope_frequencies(spec: RopeSpec, positions: Tensor) -> tuple[Tensor, float]:
    """Return the frequency of every rotated pair, and the factor on cos and sin.

    Args:
        spec: parameters of the embedding.
        positions: token positions; only their device and, for dynamic and longrope, their
            maximum are used.

    Shape:
        positions: (..., T); returns (rotary_dim / 2,), or (..., rotary_dim / 2) for dynamic and
        longrope, whose frequencies depend on the length of each sequence; in fp32
    """
    exponent = torch.arange(0, spec.rotary_dim, 2, device=positions.device).float()
    exponent = exponent / spec.rotary_dim
    plain = 1.0 / (spec.theta**exponent)
    if spec.kind == "linear":
        return plain / spec.factor, 1.0
    if spec.kind == "dynamic":
        return _dynamic(spec, exponent, positions), 1.0
    if spec.kind == "llama3":
        return _llama3(spec, plain), 1.0
    if spec.kind == "yarn":
        return _yarn(spec, exponent)
    if spec.kind == "longrope":
        return _longrope(spec, plain, positions)
    return plain, 1.0


def _dynamic(spec: RopeSpec, exponent: Tensor, positions: Tensor) -> Tensor:
    # Per sequence: its result must not depend on longer sequences in the batch.
    longest = (positions.amax(-1, keepdim=True) + 1).clamp(min=spec.max_seq_len).float()
    growth = spec.factor * longest / spec.max_seq_len - (spec.factor - 1)
    base = spec.theta * growth ** (spec.rotary_dim / (spec.rotary_dim - 2))
    return 1.0 / (base**exponent)


def _llama3(spec: RopeSpec, plain: Tensor) -> Tensor:
    assert spec.original_seq_len is not None
    wavelength = 2 * math.pi / plain
    longest_kept = spec.original_seq_len / spec.high_freq_factor
    shortest_scaled = spec.original_seq_len / spec.low_freq_factor
    smooth = (spec.original_seq_len / wavelength - spec.low_freq_factor) / (
        spec.high_freq_factor - spec.low_freq_factor
    )
    blended = (1 - smooth) * plain / spec.factor + smooth * plain
    scaled = torch.where(wavelength > shortest_scaled, plain / spec.factor, blended)
    return torch.where(wavelength < longest_kept, plain, scaled)


def _yarn(spec: RopeSpec, exponent: Tensor) -> tuple[Tensor, float]:
    assert spec.original_seq_len is not None
    dim, original = spec.rotary_dim, spec.original_seq_len

    def correction_dim(rotations: float) -> float:
        turns = original / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(spec.theta))

    low, high = correction_dim(spec.beta_fast), correction_dim(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low if high != low else 0.001
    ramp = ((torch.arange(dim // 2, device=exponent.device).float() - low) / span).clamp(0, 1)
    frequency = spec.theta**exponent
    mixed = (1.0 / (spec.factor * frequency)) * ramp + (1.0 / frequency) * (1 - ramp)
    return mixed, _yarn_factor(spec)


def _yarn_factor(spec: RopeSpec) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if spec.factor <= 1 else 0.1 * weight * math.log(spec.factor) + 1.0

    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.mscale and spec.mscale_all_dim:
        return mscale(spec.mscale) / mscale(spec.mscale_all_dim)
    return mscale(1.0)


def _longrope(spec: RopeSpec, plain: Tensor, positions: Tensor) -> tuple[Tensor, float]:
    assert spec.original_seq_len is not None
    short = torch.tensor(spec.short_factor, device=plain.device)
    long = torch.tensor(spec.long_factor, device=plain.device)
    beyond = positions.amax(-1, keepdim=True) + 1 > spec.original_seq_len
    factor = 1.0
    if spec.attention_factor is not None:
        factor = spec.attention_factor
    elif spec.factor > 1:
        factor = math.sqrt(1 + math.log(spec.factor) / math.log(spec.original_seq_len))
    return plain / torch.where(beyond, long, short), factor


def invalidates_keys(spec: RopeSpec | None, before: int, after: int) -> bool:
    """Return True if keys that were rotated in a shorter sequence must be rotated again.

    The frequencies of dynamic and longrope scaling depend on the length of the sequence.

    Args:
        spec: parameters of the embedding; None without RoPE.
        before: length in tokens when the keys were computed; 0 if there are none.
        after: length in tokens now.
    """
    if spec is None or not before or before == after:
        return False
    if spec.kind == "dynamic":
        return after > spec.max_seq_len
    if spec.kind == "longrope":
        assert spec.original_seq_len is not None
        return before <= spec.original_seq_len < after
    return False


def rope_table(spec: RopeSpec, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin for `positions`, for use with `apply_rope`.

    Shape:
        positions: (B or 1, T), integers
        returns: two tensors (B or 1, 1, T, rotary_dim)
    """
    frequencies, factor = rope_frequencies(spec, positions)
    by_row = frequencies if frequencies.dim() == 1 else frequencies[:, None, None]
    angles = positions[:, None, :, None].float() * by_row
    if spec.interleaved:
        angles = angles.repeat_interleave(2, dim=-1)
    else:
        angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def narrow_rope(
    table: tuple[Tensor, Tensor], width: int, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the rotary table for heads of `width` dims; narrower heads use the first pairs.

    Shape:
        table: two tensors (B or 1, 1, T, rotary_dim); returns two tensors of at most `width` dims
    """
    table_width = table[0].shape[-1]
    if table_width <= width:
        return table
    if interleaved:
        cos, sin = (t[..., :width] for t in table)
    else:
        cos, sin = (
            torch.cat(
                (t[..., : width // 2], t[..., table_width // 2 : table_width // 2 + width // 2]), -1
            )
            for t in table
        )
    return cos, sin


def apply_rope(x: Tensor, table: tuple[Tensor, Tensor], interleaved: bool = False) -> Tensor:
    """Rotate the first rotary_dim dims of every head by the angles of the token's position.

    Shape:
        x: (B, heads, T, H) -> same
    """
    cos, sin = table
    heads = x.transpose(1, 2)
    if len(x) == len(cos) == 1 and can_use_device_kernels(heads, cos, sin):
        rotated = torch.ops.bmforge.rotate(heads[0], cos[0, 0], sin[0, 0], interleaved)
        return rotated.transpose(0, 1)[None]
    return plain_rotate(x, cos, sin, interleaved)

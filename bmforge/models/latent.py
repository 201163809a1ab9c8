"""Base classes of decoders with multi-head latent attention (MLA).

Source: DeepSeek-AI, "DeepSeek-V2" (arXiv 2405.04434), section 2.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from bmforge.models.llama_like import LlamaLike, LlamaLikeConfig
from bmforge.models.rules import TensorParallelRule, whole_attention
from bmforge.models.sizes import LayerSizes
from bmforge.models.weights import WeightRule, linear_rules
from bmforge.nn import AttentionSpec, BlockSpec, RopeSpec
from bmforge.nn.attention_spec import LatentSpec

__all__ = ["LATENT_NAMES", "Latent", "LatentConfig"]

# Config fields of these families -> transformers' names.
LATENT_NAMES = {
    "kv_rank": "kv_lora_rank",
    "plain_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
}
_PROJECTIONS = {
    "q_a_proj": "q_a_proj",
    "q_a_norm": "q_a_layernorm",
    "q_b_proj": "q_b_proj",
    "kv_a_proj": "kv_a_proj_with_mqa",
    "kv_a_norm": "kv_a_layernorm",
    "kv_b_proj": "kv_b_proj",
}


@dataclass(kw_only=True)
class LatentConfig(LlamaLikeConfig):
    """Config of a decoder with latent attention; other fields are those of `LlamaLikeConfig`.

    Args:
        head_dim: width of a head's query and key; must be 0 or plain_dim + rope_dim.
        kv_rank: width of the latent from which keys and values are projected.
        q_rank: width of the latent from which queries are projected; 0 for no such latent.
        plain_dim: number of dims of a query and key without RoPE.
        rope_dim: number of dims of a query and key to which RoPE is applied.
        value_dim: width of a head's values.
    """

    kv_rank: int = 512
    q_rank: int = 1536
    plain_dim: int = 128
    rope_dim: int = 64
    value_dim: int = 128

    def __post_init__(self) -> None:
        """Derive `head_dim`, and check all fields."""
        self.head_dim = self.head_dim or self.plain_dim + self.rope_dim
        super().__post_init__()

    def problems(self) -> Iterator[str]:
        """Yield a message for each inconsistency among the fields."""
        yield from super().problems()
        if self.head_dim != self.plain_dim + self.rope_dim:
            yield (
                f"head_dim={self.head_dim} must equal plain_dim={self.plain_dim} + "
                f"rope_dim={self.rope_dim}"
            )
        if self.num_kv_heads != self.num_heads:
            yield f"num_kv_heads={self.num_kv_heads} must equal num_heads={self.num_heads}"
        if not 0 < self.value_dim <= self.head_dim:
            yield f"value_dim={self.value_dim} must be from 1 to {self.head_dim}"

    def saves_head_dim(self) -> bool:
        """Return True: head_dim is plain_dim + rope_dim, which are saved."""
        return True

    @property
    def interleaves(self) -> bool:
        """True if adjacent dims are rotated as pairs."""
        return True

    def rope_spec(self, rotary_dim: int = 0, interleaved: bool = False) -> RopeSpec:
        """Return the `RopeSpec`; `rotary_dim` defaults to the field `rope_dim`."""
        return super().rope_spec(rotary_dim or self.rope_dim, interleaved or self.interleaves)

    def latent_spec(self, bias: bool = False) -> LatentSpec:
        """Return the sizes of latent attention."""
        return LatentSpec(self.kv_rank, self.q_rank, self.rope_dim, self.value_dim, bias)

    def score_scale(self) -> float:
        """Return the factor on the attention scores; YaRN increases it by `mscale_all_dim`."""
        factor, weight = (self.rope_scaling.get(n) for n in ("factor", "mscale_all_dim"))
        scale = self.head_dim**-0.5
        if not weight or not factor or factor <= 1:
            return scale
        return scale * (0.1 * weight * math.log(factor) + 1) ** 2

    def layer_sizes(self) -> LayerSizes:
        """Return the sizes of a layer according to the config fields."""
        return replace(super().layer_sizes(), latent=self.latent_spec())

    @classmethod
    def _read_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        # transformers writes rope_dim as head_dim, and plain_dim + rope_dim as qk_head_dim.
        for name in ("head_dim", "qk_head_dim"):
            raw.pop(name, None)
        rank = {"q_rank": raw.pop("q_lora_rank") or 0} if "q_lora_rank" in raw else {}
        values, raw = super()._read_special(raw)
        return {**values, **rank}, raw

    def _write_special(self) -> dict[str, Any]:
        return {**super()._write_special(), "q_lora_rank": self.q_rank or None}

    def to_hf(self) -> dict[str, Any]:
        """Return the contents of config.json, without the head dims that transformers derives."""
        out = super().to_hf()
        return {k: v for k, v in out.items() if k not in ("head_dim", "qk_head_dim")}


class Latent(LlamaLike):
    """Decoder with latent attention."""

    @classmethod
    def make_block(cls, config: Any) -> BlockSpec:
        """Return the spec of the family's block, with latent attention."""
        block = super().make_block(config)
        bias = getattr(config, "attn_bias", False)
        attn = AttentionSpec(
            config.num_heads,
            config.num_heads,
            config.head_dim,
            qkv_bias=False,
            out_bias=bias,
            scale=config.score_scale(),
            dropout=config.attn_dropout,
            rope_interleaved=config.rope_spec().interleaved,
            latent=config.latent_spec(bias),
        )
        return replace(block, attn=attn)

    def tensor_parallel_rules(self) -> tuple[TensorParallelRule, ...]:
        """Return the tensor-parallel plan: MLP, embedding and head; attention is replicated."""
        return whole_attention(super().tensor_parallel_rules())

    def weight_rules(self) -> list[WeightRule]:
        """Map parameter names to transformers' names."""
        names = {
            f"layers.{{i}}.attn.{own}": f"model.layers.{{i}}.self_attn.{published}"
            for own, published in _PROJECTIONS.items()
        }
        return [*super().weight_rules(), *linear_rules(names)]

"""Seed-OSS (ByteDance Seed, 2025): Llama's block with biases on q, k and v."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from bmforge.models.heads import Head
from bmforge.models.llama_like import LlamaLike, LlamaLikeConfig, llama_heads, llama_names_with
from bmforge.nn import BlockSpec

__all__ = ["SeedOss", "SeedOssConfig"]


@dataclass(kw_only=True)
class SeedOssConfig(LlamaLikeConfig):
    """Config of Seed-OSS; other fields are those of `LlamaLikeConfig`.

    Args:
        attn_bias: use biases on q, k and v.
        out_bias: use a bias on the output projection o.
        mlp_bias: use biases in the MLP.
        dropout: dropout probability of the outputs of attention and MLP.
    """

    family: ClassVar[str] = "seed_oss"
    heads: ClassVar[dict[str, Head]] = llama_heads("SeedOss", question_prefix="transformer.")
    hf_names: ClassVar[dict[str, str]] = llama_names_with(
        head_dim="head_dim",
        attn_bias="attention_bias",
        out_bias="attention_out_bias",
        mlp_bias="mlp_bias",
        dropout="residual_dropout",
    )
    hf_defaults: ClassVar[dict[str, Any]] = {"attn_dropout": 0.1, "dropout": 0.1}
    presets: ClassVar[dict[str, dict[str, Any]]] = {"seed-oss-36b": {"rope_theta": 1e7}}
    hub_ids: ClassVar[dict[str, str]] = {"seed-oss-36b": "ByteDance-Seed/Seed-OSS-36B-Base"}

    vocab_size: int = 155136
    hidden_size: int = 5120
    intermediate_size: int = 27648
    num_layers: int = 64
    num_heads: int = 80
    num_kv_heads: int = 8
    head_dim: int = 128
    max_seq_len: int = 524288
    attn_bias: bool = True
    out_bias: bool = False
    mlp_bias: bool = False
    dropout: float = 0.0


class SeedOss(LlamaLike):
    """Seed-OSS with a language-model head."""

    config_class = SeedOssConfig

    @classmethod
    def make_block(cls, config: SeedOssConfig) -> BlockSpec:
        """Return the spec of Llama's block with Seed-OSS's biases and dropout."""
        block = super().make_block(config)
        assert block.attn is not None
        attn = replace(block.attn, out_bias=config.out_bias)
        return replace(block, attn=attn, residual_dropout=config.dropout)

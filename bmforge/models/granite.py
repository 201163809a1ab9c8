"""Granite 3 dense (IBM, "Granite 3.0 Language Models", 2024): Llama with four scaling factors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from bmforge.models.causal_lm import DecoderSpec
from bmforge.models.heads import Head
from bmforge.models.llama_like import LlamaLike, LlamaLikeConfig, llama_heads, llama_names_with
from bmforge.nn import BlockSpec

__all__ = ["Granite", "GraniteConfig"]


def _size(
    hidden: int, intermediate: int, heads: int, logits: float, attention: float
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_heads": heads,
        "logit_divisor": logits,
        "attn_scale": attention,
    }


@dataclass(kw_only=True)
class GraniteConfig(LlamaLikeConfig):
    """Config of Granite; other fields are those of `LlamaLikeConfig`.

    Args:
        attn_bias: use biases on q, k, v and o.
        mlp_bias: use biases in the MLP.
        embed_scale: factor on the embedding.
        residual_scale: factor on the outputs of attention and MLP.
        attn_scale: factor on the attention scores.
        logit_divisor: divisor of the logits.
    """

    family: ClassVar[str] = "granite"
    heads: ClassVar[dict[str, Head]] = llama_heads("Granite", classifiers=())
    hf_names: ClassVar[dict[str, str]] = llama_names_with(
        attn_bias="attention_bias",
        mlp_bias="mlp_bias",
        embed_scale="embedding_multiplier",
        residual_scale="residual_multiplier",
        attn_scale="attention_multiplier",
        logit_divisor="logits_scaling",
    )
    # transformers' defaults, which no published checkpoint uses.
    hf_defaults: ClassVar[dict[str, Any]] = {
        "norm_eps": 1e-6,
        "tie_word_embeddings": False,
        **dict.fromkeys(("embed_scale", "residual_scale", "attn_scale", "logit_divisor"), 1.0),
    }
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "granite-3-2b": _size(2048, 8192, 32, 8.0, 0.015625),
        "granite-3-8b": _size(4096, 12800, 32, 16.0, 0.0078125),
    }
    hub_ids: ClassVar[dict[str, str]] = {
        "granite-3-2b": "ibm-granite/granite-3.0-2b-base",
        "granite-3-8b": "ibm-granite/granite-3.0-8b-base",
    }

    vocab_size: int = 49155
    hidden_size: int = 2048
    intermediate_size: int = 8192
    num_layers: int = 40
    num_heads: int = 32
    num_kv_heads: int = 8
    max_seq_len: int = 4096
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    attn_bias: bool = False
    mlp_bias: bool = False
    embed_scale: float = 12.0
    residual_scale: float = 0.22
    attn_scale: float = 0.015625
    logit_divisor: float = 8.0

    def problems(self) -> Iterator[str]:
        """Yield a message for each inconsistency among the fields."""
        yield from super().problems()
        if not self.logit_divisor:
            yield f"logit_divisor={self.logit_divisor} must not be 0"


class Granite(LlamaLike):
    """Granite with a language-model head."""

    config_class = GraniteConfig

    @classmethod
    def make_block(cls, config: GraniteConfig) -> BlockSpec:
        """Return the spec of Llama's block with Granite's factors."""
        block = super().make_block(config)
        assert block.attn is not None
        attn = replace(block.attn, scale=config.attn_scale)
        return replace(block, attn=attn, residual_scale=config.residual_scale)

    @classmethod
    def make_spec(cls, config: GraniteConfig) -> DecoderSpec:
        """Return the `DecoderSpec` of the model."""
        return replace(
            super().make_spec(config),
            embed_scale=config.embed_scale,
            head_scale=1.0 / config.logit_divisor,
        )

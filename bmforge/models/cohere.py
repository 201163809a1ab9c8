"""Command R and Aya (Cohere, 2024): parallel attention and MLP after one norm without bias.

Command R+ normalizes q and k per head with a layer norm; it runs with transformers' implementation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from bmforge.models.causal_lm import DecoderSpec
from bmforge.models.heads import Head
from bmforge.models.llama_like import (
    LlamaLike,
    LlamaLikeConfig,
    llama_heads,
    llama_names_with,
    preset_size,
)
from bmforge.nn import BlockSpec, NormSpec

__all__ = ["Cohere", "CohereConfig"]


@dataclass(kw_only=True)
class CohereConfig(LlamaLikeConfig):
    """Config of Command R; other fields are those of `LlamaLikeConfig`.

    Args:
        attn_bias: use biases on q, k, v and o.
        logit_scale: factor on the logits.
    """

    family: ClassVar[str] = "cohere"
    default_theta: ClassVar[float] = 500000.0
    heads: ClassVar[dict[str, Head]] = llama_heads("Cohere", classifiers=())
    hf_names: ClassVar[dict[str, str]] = llama_names_with(
        norm_eps="layer_norm_eps", attn_bias="attention_bias", logit_scale="logit_scale"
    )
    hf_required: ClassVar[dict[str, tuple[Any, ...]]] = {"use_qk_norm": (False, None)}
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "command-r-35b": {"max_seq_len": 131072, "rope_theta": 8e6},
        "aya-23-8b": {**preset_size(4096, 14336, 32, 32, 8), "rope_theta": 10000.0},
    }
    hub_ids: ClassVar[dict[str, str]] = {
        "command-r-35b": "CohereLabs/c4ai-command-r-v01",
        "aya-23-8b": "CohereLabs/aya-23-8B",
    }

    vocab_size: int = 256000
    hidden_size: int = 8192
    intermediate_size: int = 22528
    num_layers: int = 40
    num_heads: int = 64
    max_seq_len: int = 8192
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    attn_bias: bool = False
    logit_scale: float = 0.0625

    @classmethod
    def opens(cls, raw: dict[str, Any]) -> bool:
        """Return True for this family's config.json, unless it has (unsupported) q and k norms."""
        return super().opens(raw) and not raw.get("use_qk_norm")


class Cohere(LlamaLike):
    """Command R with a language-model head."""

    config_class: ClassVar[type[LlamaLikeConfig]] = CohereConfig

    @classmethod
    def make_block(cls, config: Any) -> BlockSpec:
        """Return Llama's block with parallel sublayers, and a layer norm without bias."""
        block = super().make_block(config)
        assert block.attn is not None
        attn = replace(block.attn, rope_interleaved=True)
        norm = NormSpec("layer", config.norm_eps, bias=False)
        return replace(block, attn=attn, norm=norm, norm_place="parallel")

    @classmethod
    def make_spec(cls, config: Any) -> DecoderSpec:
        """Return the `DecoderSpec` of the model."""
        return replace(
            super().make_spec(config),
            rope=config.rope_spec(interleaved=True),
            head_scale=config.logit_scale,
        )

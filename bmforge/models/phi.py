"""Phi-1, Phi-1.5 and Phi-2 (Gunasekar et al., "Textbooks Are All You Need", arXiv 2306.11644)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from bmforge.models.causal_lm import DecoderSpec
from bmforge.models.heads import Head, classifier_heads
from bmforge.models.llama_like import LlamaLike, PartialRotaryConfig, llama_names_with
from bmforge.models.weights import WeightRule, linear_rules
from bmforge.nn import BlockSpec, NormSpec

__all__ = ["Phi", "PhiConfig"]

_LM_NAMES = {"lm_head.weight": "lm_head.weight", "lm_head.bias": "lm_head.bias"}


@dataclass(kw_only=True)
class PhiConfig(PartialRotaryConfig):
    """Config of Phi; other fields are those of `PartialRotaryConfig`.

    Args:
        embed_dropout: dropout probability of the embedding.
        dropout: dropout probability of the outputs of attention and MLP.
    """

    family: ClassVar[str] = "phi"
    default_part: ClassVar[float] = 0.5
    has_gate: ClassVar[bool] = False
    heads: ClassVar[dict[str, Head]] = {
        "language_model": Head("PhiForCausalLM", _LM_NAMES),
        **classifier_heads("Phi", "score", "score", "", sequence_bias=False),
        "none": Head("PhiModel", prefix=""),
    }
    hf_names: ClassVar[dict[str, str]] = llama_names_with(
        norm_eps="layer_norm_eps", embed_dropout="embd_pdrop", dropout="resid_pdrop"
    )
    hf_required: ClassVar[dict[str, tuple[Any, ...]]] = {"qk_layernorm": (False, None)}
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "phi-1": {},
        "phi-1.5": {},
        "phi-2": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_layers": 32,
            "rotary_part": 0.4,
        },
    }
    hub_ids: ClassVar[dict[str, str]] = {
        "phi-1": "microsoft/phi-1",
        "phi-1.5": "microsoft/phi-1_5",
        "phi-2": "microsoft/phi-2",
    }

    vocab_size: int = 51200
    hidden_size: int = 2048
    intermediate_size: int = 8192
    num_layers: int = 24
    num_heads: int = 32
    max_seq_len: int = 2048
    norm_eps: float = 1e-5
    rotary_part: float = 0.5
    activation: str = "gelu_new"
    embed_dropout: float = 0.0
    dropout: float = 0.0

    @classmethod
    def opens(cls, raw: dict[str, Any]) -> bool:
        """Return True for this family's config.json, unless it has (unsupported) q and k norms."""
        return super().opens(raw) and not raw.get("qk_layernorm")


class Phi(LlamaLike):
    """Phi-1 or Phi-2 with a language-model head."""

    config_class = PhiConfig

    @classmethod
    def make_block(cls, config: PhiConfig) -> BlockSpec:
        """Return the spec of a parallel block with one layer norm and biases everywhere."""
        block = super().make_block(config)
        assert block.attn is not None
        assert block.mlp is not None
        return replace(
            block,
            attn=replace(block.attn, qkv_bias=True, out_bias=True),
            mlp=replace(block.mlp, bias=True),
            norm=NormSpec("layer", config.norm_eps),
            norm_place="parallel",
            residual_dropout=config.dropout,
        )

    @classmethod
    def make_spec(cls, config: PhiConfig) -> DecoderSpec:
        """Return the `DecoderSpec` of the model."""
        return replace(
            super().make_spec(config), embed_dropout=config.embed_dropout, head_bias=True
        )

    def weight_rules(self) -> list[WeightRule]:
        """Map parameter names to transformers' names."""
        block, published = "layers.{i}.", "model.layers.{i}."
        parts = {
            "norm": "model.final_layernorm",
            f"{block}attn_norm": f"{published}input_layernorm",
            f"{block}attn.o_proj": f"{published}self_attn.dense",
            f"{block}mlp.up_proj": f"{published}mlp.fc1",
            f"{block}mlp.down_proj": f"{published}mlp.fc2",
        }
        parts |= {f"{block}attn.{p}_proj": f"{published}self_attn.{p}_proj" for p in "qkv"}
        return [WeightRule("embed.weight", "model.embed_tokens.weight"), *linear_rules(parts)]

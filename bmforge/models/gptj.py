"""GPT-J (Wang and Komatsuzaki, "GPT-J-6B: A 6 Billion Parameter Autoregressive LM", 2021)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from bmforge.models.causal_lm import CausalLM, DecoderSpec
from bmforge.models.config import ModelConfig
from bmforge.models.heads import Head, classifier_heads
from bmforge.models.traits import Traits
from bmforge.models.weights import WeightRule, linear_rules
from bmforge.nn import AttentionSpec, BlockSpec, MLPSpec, NormSpec, RopeSpec

__all__ = ["GPTJ", "GPTJConfig"]

_LM_NAMES = {"lm_head.weight": "lm_head.weight", "lm_head.bias": "lm_head.bias"}


@dataclass(kw_only=True)
class GPTJConfig(ModelConfig):
    """Config of GPT-J; other fields are those of `ModelConfig`.

    Args:
        rotary_dim: number of head dims that are rotated (even).
        activation: activation of the MLP, such as gelu, gelu_new, relu or silu.
        embed_dropout: dropout probability of the embedding.
        dropout: dropout probability of the outputs of attention and MLP.
        attn_dropout: dropout probability of attention weights.
    """

    family: ClassVar[str] = "gptj"
    heads: ClassVar[dict[str, Head]] = {
        "language_model": Head("GPTJForCausalLM", _LM_NAMES),
        **classifier_heads("GPTJ", "score", "", "qa_outputs", sequence_bias=False),
        "none": Head("GPTJModel", prefix=""),
    }
    hf_names: ClassVar[dict[str, str]] = {
        "vocab_size": "vocab_size",
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_layers": "n_layer",
        "num_heads": "n_head",
        "max_seq_len": "n_positions",
        "rotary_dim": "rotary_dim",
        "norm_eps": "layer_norm_epsilon",
        "activation": "activation_function",
        "embed_dropout": "embd_pdrop",
        "dropout": "resid_pdrop",
        "attn_dropout": "attn_pdrop",
        "init_std": "initializer_range",
        "tie_word_embeddings": "tie_word_embeddings",
    }
    # n_ctx repeats n_positions; the summary_ fields belong to a multiple-choice head.
    hf_ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "n_ctx",
            "summary_type",
            "summary_use_proj",
            "summary_activation",
            "summary_proj_to_labels",
            "summary_first_dropout",
        }
    )
    hf_required: ClassVar[dict[str, tuple[Any, ...]]] = {
        "rotary": (True,),
        "scale_attn_weights": (True,),
    }
    presets: ClassVar[dict[str, dict[str, Any]]] = {"gptj-6b": {}}
    hub_ids: ClassVar[dict[str, str]] = {"gptj-6b": "EleutherAI/gpt-j-6b"}

    vocab_size: int = 50400
    hidden_size: int = 4096
    intermediate_size: int = 0
    num_layers: int = 28
    num_heads: int = 16
    num_kv_heads: int = 0
    head_dim: int = 0
    max_seq_len: int = 2048
    rotary_dim: int = 64
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    activation: str = "gelu_new"
    embed_dropout: float = 0.0
    dropout: float = 0.0
    attn_dropout: float = 0.0

    def problems(self) -> Iterator[str]:
        """Yield a message for each inconsistency among the fields."""
        yield from super().problems()
        if not 0 < self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            yield (
                f"rotary_dim={self.rotary_dim} must be even and between 2 and "
                f"head_dim={self.head_dim}"
            )

    def _write_special(self) -> dict[str, Any]:
        implied = self.intermediate_size == 4 * self.hidden_size
        keep_none = implied and self.raw.get("n_inner") is None
        return {"n_inner": None if keep_none else self.intermediate_size}


class GPTJ(CausalLM):
    """GPT-J: parallel attention and MLP after one norm, with interleaved rotary pairs."""

    config_class = GPTJConfig
    family_traits = Traits("causal", "next token", "rotary")
    scales_residuals = True
    hf_prefix = "transformer."

    def __init__(self, config: GPTJConfig) -> None:
        attn = AttentionSpec(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            qkv_bias=False,
            out_bias=False,
            dropout=config.attn_dropout,
            rope_interleaved=True,
        )
        block = BlockSpec(
            config.hidden_size,
            attn,
            MLPSpec(config.intermediate_size, config.activation),
            norm=NormSpec("layer", config.norm_eps),
            norm_place="parallel",
            residual_dropout=config.dropout,
        )
        rope = RopeSpec(config.rotary_dim, max_seq_len=config.max_seq_len, interleaved=True)
        super().__init__(
            config,
            DecoderSpec(block, rope=rope, embed_dropout=config.embed_dropout, head_bias=True),
        )

    def weight_rules(self) -> list[WeightRule]:
        """Map parameter names to transformers' names."""
        block, published = "layers.{i}.", "transformer.h.{i}."
        parts = {f"{block}attn.{p}": f"{published}attn.{p}" for p in ("q_proj", "k_proj", "v_proj")}
        return [
            WeightRule("embed.weight", "transformer.wte.weight"),
            *linear_rules(
                {
                    "norm": "transformer.ln_f",
                    f"{block}attn_norm": f"{published}ln_1",
                    **parts,
                    f"{block}attn.o_proj": f"{published}attn.out_proj",
                    f"{block}mlp.up_proj": f"{published}mlp.fc_in",
                    f"{block}mlp.down_proj": f"{published}mlp.fc_out",
                }
            ),
        ]

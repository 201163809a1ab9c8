"""CPM-1 (Zhang et al., "CPM: A Large-scale Generative Chinese Pre-trained Language Model", 2020).

A GPT-2 in Megatron format; the weight names in checkpoints are those of `model/gpt2_modeling.py` in
TsinghuaAI/CPM-1-Generate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from bmforge.models.causal_lm import CausalLM, DecoderSpec
from bmforge.models.config import ModelConfig
from bmforge.models.heads import Head
from bmforge.models.traits import Traits
from bmforge.models.weights import WeightRule, linear_rules
from bmforge.nn import AttentionSpec, BlockSpec, MLPSpec, NormSpec

__all__ = ["CPM1", "CPM1Config"]


@dataclass(kw_only=True)
class CPM1Config(ModelConfig):
    """Config of CPM-1; other fields are those of `ModelConfig`.

    Args:
        dropout: dropout probability of embeddings and of each sublayer's output.
        attn_dropout: dropout probability of attention weights.
    """

    family: ClassVar[str] = "cpm1"
    heads: ClassVar[dict[str, Head]] = {
        "language_model": Head("GPT2Model", {"lm_head.weight": "word_embeddings.weight"}),
        "none": Head("CPM1Model"),
    }
    # Argument names of the original model.
    hf_names: ClassVar[dict[str, str]] = {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_layers": "num_layers",
        "num_heads": "num_attention_heads",
        "max_seq_len": "max_sequence_length",
        "norm_eps": "layernorm_epsilon",
        "dropout": "output_dropout_prob",
        "attn_dropout": "attention_dropout_prob",
        "init_std": "initializer_range",
    }
    # Options of the original program without effect on results; embedding dropout equals `dropout`.
    hf_ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "checkpoint_activations",
            "checkpoint_num_layers",
            "embedding_dropout_prob",
            "parallel_output",
        }
    )
    hf_defaults: ClassVar[dict[str, Any]] = {"dropout": 0.1, "attn_dropout": 0.1}
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "cpm1-small": {"hidden_size": 768, "num_layers": 12, "num_heads": 12},
        "cpm1-medium": {"hidden_size": 1024, "num_layers": 24, "num_heads": 16},
        "cpm1-large": {"hidden_size": 2560, "num_layers": 32, "num_heads": 32},
    }

    vocab_size: int = 30000
    hidden_size: int = 2560
    intermediate_size: int = 0
    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int = 0
    head_dim: int = 0
    max_seq_len: int = 1024
    norm_eps: float = 1e-5
    dropout: float = 0.0
    attn_dropout: float = 0.0

    def problems(self) -> Iterator[str]:
        """Yield a message for each inconsistency among the fields."""
        yield from super().problems()
        yield from self.find_unsavable(
            intermediate_size=4 * self.hidden_size, tie_word_embeddings=True
        )


class CPM1(CausalLM):
    """CPM-1 with a language-model head, tied to the embedding."""

    config_class = CPM1Config
    family_traits = Traits("causal", "next token", "learned", tokenizer="CPM1Tokenizer")
    scales_residuals = True

    def __init__(self, config: CPM1Config) -> None:
        attn = AttentionSpec(
            config.num_heads, config.num_kv_heads, config.head_dim, dropout=config.attn_dropout
        )
        block = BlockSpec(
            config.hidden_size,
            attn,
            MLPSpec(config.intermediate_size, "gelu_tanh"),
            norm=NormSpec("layer", config.norm_eps),
            residual_dropout=config.dropout,
        )
        super().__init__(config, DecoderSpec(block, embed_dropout=config.dropout))

    def megatron_rules(self) -> list[WeightRule]:
        """Map parameter names to the names in Megatron shards."""
        return self.all_rules()

    def weight_rules(self) -> list[WeightRule]:
        """Map parameter names to names in checkpoints; q, k and v are rows of one matrix."""
        width = self.config.hidden_size
        block, published = "layers.{i}.", "transformer.layers.{i}."
        modules = {
            "norm": "transformer.final_layernorm",
            f"{block}attn_norm": f"{published}input_layernorm",
            f"{block}mlp_norm": f"{published}post_attention_layernorm",
            f"{block}attn.o_proj": f"{published}attention.dense",
            f"{block}mlp.up_proj": f"{published}mlp.dense_h_to_4h",
            f"{block}mlp.down_proj": f"{published}mlp.dense_4h_to_h",
        }
        return [
            WeightRule("embed.weight", "word_embeddings.weight"),
            WeightRule("embed_positions.weight", "position_embeddings.weight"),
            *linear_rules(modules),
            *(
                WeightRule(
                    f"{block}attn.{part}.{kind}",
                    f"{published}attention.query_key_value.{kind}",
                    part=(number * width, 3 * width),
                )
                for kind in ("weight", "bias")
                for number, part in enumerate(("q_proj", "k_proj", "v_proj"))
            ),
        ]

"""GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from bmforge.models.causal_lm import CausalLM, DecoderSpec
from bmforge.models.config import ModelConfig
from bmforge.models.heads import Head, classifier_heads
from bmforge.models.traits import Traits
from bmforge.models.weights import WeightRule
from bmforge.nn import AttentionSpec, BlockSpec, MLPSpec, NormSpec

__all__ = ["GPT2", "GPT2Config"]


def _size(hidden_size: int, num_layers: int, num_heads: int) -> dict[str, int]:
    return {"hidden_size": hidden_size, "num_layers": num_layers, "num_heads": num_heads}


@dataclass(kw_only=True)
class GPT2Config(ModelConfig):
    """Config of GPT-2; other fields are those of `ModelConfig`.

    Args:
        activation: activation of the MLP, such as gelu, gelu_new, relu or silu.
        dropout: dropout probability of each sublayer's output.
        embed_dropout: dropout probability of the embedding; None means `dropout`.
        attn_dropout: dropout probability of attention weights.
        bias: use biases in attention and MLP, as in the published models.

    CPM-Pretrain has models without biases and with a head_dim other than hidden_size / num_heads;
    they are saved with fields that transformers does not know.
    """

    family: ClassVar[str] = "gpt2"
    heads: ClassVar[dict[str, Head]] = {
        "language_model": Head("GPT2LMHeadModel", {"lm_head.weight": "lm_head.weight"}),
        **classifier_heads("GPT2", "score", "classifier", "qa_outputs", sequence_bias=False),
        "none": Head("GPT2Model", prefix=""),
    }
    hf_names: ClassVar[dict[str, str]] = {
        "vocab_size": "vocab_size",
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_layers": "n_layer",
        "num_heads": "n_head",
        "max_seq_len": "n_positions",
        "norm_eps": "layer_norm_epsilon",
        "activation": "activation_function",
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
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
        "add_cross_attention": (False,),
    }
    hf_defaults: ClassVar[dict[str, Any]] = {"dropout": 0.1, "attn_dropout": 0.1}
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "gpt2": _size(768, 12, 12),
        "gpt2-small": _size(768, 12, 12),
        "gpt2-medium": _size(1024, 24, 16),
        "gpt2-large": _size(1280, 36, 20),
        "gpt2-xl": _size(1600, 48, 25),
        "wenzhong-gpt2-3.5b": {**_size(3072, 30, 32), "vocab_size": 50304},
    }
    hub_ids: ClassVar[dict[str, str]] = {
        "gpt2-small": "openai-community/gpt2",
        "gpt2-base": "openai-community/gpt2",
        **{name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large")},
        "gpt2-xl": "openai-community/gpt2-xl",
        "wenzhong-gpt2-3.5b": "IDEA-CCNL/Wenzhong-GPT2-3.5B",
    }

    vocab_size: int = 50257
    hidden_size: int = 768
    intermediate_size: int = 0
    num_layers: int = 12
    num_heads: int = 12
    num_kv_heads: int = 0
    head_dim: int = 0
    max_seq_len: int = 1024
    norm_eps: float = 1e-5
    activation: str = "gelu_new"
    dropout: float = 0.0
    embed_dropout: float | None = None
    attn_dropout: float = 0.0
    bias: bool = True

    @classmethod
    def _read_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        embed, residual = raw.pop("embd_pdrop", 0.1), raw.get("resid_pdrop", 0.1)
        values: dict[str, Any] = {
            name: raw.pop(name) for name in ("head_dim", "bias") if name in raw
        }
        if embed != residual:
            values["embed_dropout"] = embed
        return values, raw

    def saves_head_dim(self) -> bool:
        """Return True: `_write_special` saves a head_dim other than hidden_size / num_heads."""
        return True

    def _write_special(self) -> dict[str, Any]:
        implied = self.intermediate_size == 4 * self.hidden_size
        keep_none = implied and self.raw.get("n_inner") is None
        is_usual = self.num_heads * self.head_dim == self.hidden_size
        return {
            **({} if is_usual else {"head_dim": self.head_dim}),
            **({} if self.bias else {"bias": False}),
            "embd_pdrop": self.dropout if self.embed_dropout is None else self.embed_dropout,
            "n_inner": None if keep_none else self.intermediate_size,
        }


class GPT2(CausalLM):
    """GPT-2 with a language-model head, by default tied to the embedding."""

    config_class = GPT2Config
    family_traits = Traits("causal", "next token", "learned")
    scales_residuals = True
    hf_prefix = "transformer."

    def __init__(self, config: GPT2Config) -> None:
        attn = AttentionSpec(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            qkv_bias=config.bias,
            out_bias=config.bias,
            dropout=config.attn_dropout,
        )
        block = BlockSpec(
            config.hidden_size,
            attn,
            MLPSpec(config.intermediate_size, config.activation, bias=config.bias),
            norm=NormSpec("layer", config.norm_eps),
            residual_dropout=config.dropout,
        )
        embed = config.dropout if config.embed_dropout is None else config.embed_dropout
        super().__init__(config, DecoderSpec(block, embed_dropout=embed))

    def weight_rules(self) -> list[WeightRule]:
        """Map parameter names to transformers' names; Conv1D is transposed, q, k, v are fused."""
        width = self.config.num_heads * self.config.head_dim
        block, published = "layers.{i}.", "transformer.h.{i}."
        rules = [
            WeightRule("embed.weight", "transformer.wte.weight"),
            WeightRule("embed_positions.weight", "transformer.wpe.weight"),
            WeightRule("norm.weight", "transformer.ln_f.weight"),
            WeightRule("norm.bias", "transformer.ln_f.bias"),
        ]
        for kind in ("weight", "bias"):
            rules += [
                WeightRule(f"{block}attn_norm.{kind}", f"{published}ln_1.{kind}"),
                WeightRule(f"{block}mlp_norm.{kind}", f"{published}ln_2.{kind}"),
            ]
        for kind in ("weight", "bias") if self.config.bias else ("weight",):
            transpose = kind == "weight"
            rules += [
                WeightRule(
                    f"{block}attn.o_proj.{kind}", f"{published}attn.c_proj.{kind}", transpose
                ),
                WeightRule(f"{block}mlp.up_proj.{kind}", f"{published}mlp.c_fc.{kind}", transpose),
                WeightRule(
                    f"{block}mlp.down_proj.{kind}", f"{published}mlp.c_proj.{kind}", transpose
                ),
            ]
            for number, part in enumerate(("q_proj", "k_proj", "v_proj")):
                rows = (number * width, 3 * width)
                fused = f"{published}attn.c_attn.{kind}"
                rules.append(WeightRule(f"{block}attn.{part}.{kind}", fused, transpose, rows))
        return rules

"""Llama 1, 2 and 3 (Touvron et al. 2023; "The Llama 3 Herd of Models", Meta 2024)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from bmforge.models.causal_lm import CausalLM, DecoderSpec
from bmforge.models.heads import Head, classifier_heads
from bmforge.models.rotary import RotaryConfig
from bmforge.models.traits import Traits
from bmforge.models.weights import WeightRule, linear_rules
from bmforge.nn import AttentionSpec, BlockSpec, MLPSpec, NormSpec

__all__ = ["Llama", "LlamaConfig", "gate_up_rules", "llama_heads", "llama_rules"]

_ATTENTION_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")


def llama_heads(
    stem: str, sequence: str = "score", question_prefix: str | None = None
) -> dict[str, Head]:
    """Return the heads of Llama and of families that transformers derives from it.

    Args:
        stem: prefix of transformers' class names.
        sequence: published module of the sequence and token classifiers.
        question_prefix: prefix of the body's parameter names in question answering checkpoints.
    """
    heads = classifier_heads(stem, sequence, sequence, "qa_outputs", sequence_bias=False)
    heads["question_answering"] = replace(heads["question_answering"], prefix=question_prefix)
    return {
        "language_model": Head(f"{stem}ForCausalLM", {"lm_head.weight": "lm_head.weight"}),
        **heads,
        "none": Head(f"{stem}Model", prefix=""),
    }


def llama_rules() -> list[WeightRule]:
    """Return the map of the body's weight names to transformers' names."""
    block, published = "layers.{i}.", "model.layers.{i}."
    parts = {f"{block}attn.{p}": f"{published}self_attn.{p}" for p in _ATTENTION_PARTS}
    parts |= {
        f"{block}mlp.{p}": f"{published}mlp.{p}" for p in ("gate_proj", "up_proj", "down_proj")
    }
    return [
        WeightRule("embed.weight", "model.embed_tokens.weight"),
        WeightRule("norm.weight", "model.norm.weight"),
        WeightRule(f"{block}attn_norm.weight", f"{published}input_layernorm.weight"),
        WeightRule(f"{block}mlp_norm.weight", f"{published}post_attention_layernorm.weight"),
        *linear_rules(parts),
    ]


def gate_up_rules(width: int) -> list[WeightRule]:
    """Return the weight rules of an MLP whose gate and up are one published tensor.

    Args:
        width: hidden width F of the MLP.
    """
    return [
        WeightRule(
            f"layers.{{i}}.mlp.{part}.weight",
            "model.layers.{i}.mlp.gate_up_proj.weight",
            part=(number * width, 2 * width),
        )
        for number, part in enumerate(("gate_proj", "up_proj"))
    ]


def _size(hidden: int, intermediate: int, layers: int, heads: int, kv: int) -> dict[str, Any]:
    names = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
    return dict(zip(names, (hidden, intermediate, layers, heads, kv), strict=True))


_LLAMA2 = {"max_seq_len": 4096, "norm_eps": 1e-5}
_LLAMA3 = {"vocab_size": 128256, "max_seq_len": 8192, "norm_eps": 1e-5, "rope_theta": 5e5}
_LLAMA31 = {
    **_LLAMA3,
    "max_seq_len": 131072,
    "rope_scaling": {
        "kind": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_seq_len": 8192,
    },
}
_LLAMA32 = {
    **_LLAMA31,
    "tie_word_embeddings": True,
    "rope_scaling": {**_LLAMA31["rope_scaling"], "factor": 32.0},  # type: ignore[dict-item]
}


@dataclass(kw_only=True)
class LlamaConfig(RotaryConfig):
    """Config of Llama; other fields are those of the base class.

    Args:
        activation: activation of the gated MLP.
        attn_bias: biases on q, k, v and o.
        mlp_bias: biases in the MLP.
        attn_dropout: dropout probability of attention weights.
        pad_token_id: token whose embedding gets no gradient; None if there is none.
    """

    family: ClassVar[str] = "llama"
    heads: ClassVar[dict[str, Head]] = llama_heads("Llama", question_prefix="transformer.")
    hf_names: ClassVar[dict[str, str]] = {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "max_seq_len": "max_position_embeddings",
        "norm_eps": "rms_norm_eps",
        "activation": "hidden_act",
        "attn_bias": "attention_bias",
        "mlp_bias": "mlp_bias",
        "attn_dropout": "attention_dropout",
        "init_std": "initializer_range",
        "tie_word_embeddings": "tie_word_embeddings",
        "pad_token_id": "pad_token_id",
    }
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "llama-7b": _size(4096, 11008, 32, 32, 32),
        "llama-13b": _size(5120, 13824, 40, 40, 40),
        "llama-30b": _size(6656, 17920, 60, 52, 52),
        "llama-65b": _size(8192, 22016, 80, 64, 64),
        "llama-2-7b": {**_size(4096, 11008, 32, 32, 32), **_LLAMA2},
        "llama-2-13b": {**_size(5120, 13824, 40, 40, 40), **_LLAMA2},
        "llama-2-70b": {**_size(8192, 28672, 80, 64, 8), **_LLAMA2},
        "llama-3-8b": {**_size(4096, 14336, 32, 32, 8), **_LLAMA3},
        "llama-3-70b": {**_size(8192, 28672, 80, 64, 8), **_LLAMA3},
        "llama-3.1-8b": {**_size(4096, 14336, 32, 32, 8), **_LLAMA31},
        "llama-3.1-70b": {**_size(8192, 28672, 80, 64, 8), **_LLAMA31},
        "llama-3.1-405b": {**_size(16384, 53248, 126, 128, 8), **_LLAMA31},
        "llama-3.2-1b": {**_size(2048, 8192, 16, 32, 8), **_LLAMA32},
        "llama-3.2-3b": {**_size(3072, 8192, 28, 24, 8), **_LLAMA32},
    }
    hub_ids: ClassVar[dict[str, str]] = {
        **{f"llama-{n}": f"huggyllama/llama-{n}" for n in ("7b", "13b", "30b", "65b")},
        **{f"llama-2-{n}": f"meta-llama/Llama-2-{n}-hf" for n in ("7b", "13b", "70b")},
        **{f"llama-3-{n}": f"meta-llama/Meta-Llama-3-{n.upper()}" for n in ("8b", "70b")},
        **{f"llama-3.1-{n}": f"meta-llama/Llama-3.1-{n.upper()}" for n in ("8b", "70b", "405b")},
        **{f"llama-3.2-{n}": f"meta-llama/Llama-3.2-{n.upper()}" for n in ("1b", "3b")},
    }

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int = 0
    head_dim: int = 0
    max_seq_len: int = 2048
    norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    activation: str = "silu"
    attn_bias: bool = False
    mlp_bias: bool = False
    attn_dropout: float = 0.0
    pad_token_id: int | None = None

    @property
    def is_gated(self) -> bool:
        """True: Llama's MLP has a gate."""
        return True


class Llama(CausalLM):
    """Llama with a language-model head."""

    config_class = LlamaConfig
    family_traits = Traits("left", "next token", "rotary")
    hf_prefix = "model."

    def __init__(self, config: LlamaConfig) -> None:
        attn = AttentionSpec(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            qkv_bias=config.attn_bias,
            out_bias=config.attn_bias,
            dropout=config.attn_dropout,
        )
        mlp = MLPSpec(config.intermediate_size, config.activation, gated=True, bias=config.mlp_bias)
        norm = NormSpec("rms", config.norm_eps)
        block = BlockSpec(config.hidden_size, attn, mlp, norm=norm)
        super().__init__(
            config, DecoderSpec(block, rope=config.rope_spec(), padding_id=config.pad_token_id)
        )

    def weight_rules(self) -> list[WeightRule]:
        """Return the map to transformers' names."""
        return llama_rules()

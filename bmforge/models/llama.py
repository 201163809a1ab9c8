"""Llama 1, 2 and 3 (Touvron et al. 2023; "The Llama 3 Herd of Models", Meta 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from bmforge.models.heads import Head
from bmforge.models.llama_like import (
    LlamaLike,
    LlamaLikeConfig,
    llama_heads,
    llama_names_with,
    preset_size,
)

__all__ = ["Llama", "LlamaConfig"]

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
class LlamaConfig(LlamaLikeConfig):
    """Config of Llama; other fields are those of `LlamaLikeConfig`.

    Args:
        attn_bias: use biases on q, k, v and o.
        mlp_bias: use biases in the MLP.
    """

    family: ClassVar[str] = "llama"
    heads: ClassVar[dict[str, Head]] = llama_heads("Llama", question_prefix="transformer.")
    hf_names: ClassVar[dict[str, str]] = llama_names_with(
        head_dim="head_dim", attn_bias="attention_bias", mlp_bias="mlp_bias"
    )
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "llama-7b": preset_size(4096, 11008, 32, 32, 32),
        "llama-13b": preset_size(5120, 13824, 40, 40, 40),
        "llama-30b": preset_size(6656, 17920, 60, 52, 52),
        "llama-65b": preset_size(8192, 22016, 80, 64, 64),
        "llama-2-7b": {**preset_size(4096, 11008, 32, 32, 32), **_LLAMA2},
        "llama-2-13b": {**preset_size(5120, 13824, 40, 40, 40), **_LLAMA2},
        "llama-2-70b": {**preset_size(8192, 28672, 80, 64, 8), **_LLAMA2},
        "llama-3-8b": {**preset_size(4096, 14336, 32, 32, 8), **_LLAMA3},
        "llama-3-70b": {**preset_size(8192, 28672, 80, 64, 8), **_LLAMA3},
        "llama-3.1-8b": {**preset_size(4096, 14336, 32, 32, 8), **_LLAMA31},
        "llama-3.1-70b": {**preset_size(8192, 28672, 80, 64, 8), **_LLAMA31},
        "llama-3.1-405b": {**preset_size(16384, 53248, 126, 128, 8), **_LLAMA31},
        "llama-3.2-1b": {**preset_size(2048, 8192, 16, 32, 8), **_LLAMA32},
        "llama-3.2-3b": {**preset_size(3072, 8192, 28, 24, 8), **_LLAMA32},
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
    max_seq_len: int = 2048
    attn_bias: bool = False
    mlp_bias: bool = False


class Llama(LlamaLike):
    """Llama with a language-model head."""

    config_class = LlamaConfig

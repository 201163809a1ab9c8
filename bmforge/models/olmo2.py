"""OLMo 2 and 3 (OLMo Team, "2 OLMo 2 Furious", arXiv 2501.00656; "Olmo 3", 2025).

The block is Llama's with norms on the outputs of the sublayers, and norms of q and k over all
heads. In OLMo 3, three of four layers have a sliding window.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from bmforge.models.heads import Head
from bmforge.models.layer_types import LayerTypes, LocalRotaryConfig
from bmforge.models.llama_like import (
    LlamaLike,
    LlamaLikeConfig,
    llama_heads,
    llama_names_with,
    preset_size,
    rules_with_norms,
)
from bmforge.models.rules import TensorParallelRule, whole_attention
from bmforge.models.weights import WeightRule
from bmforge.nn import BlockSpec, NormSpec

__all__ = ["OLMo2", "OLMo2Config", "OLMo3", "OLMo3Config"]

_OUTPUT_NORMS = {
    "attn_norm": "post_attention_layernorm",
    "mlp_norm": "post_feedforward_layernorm",
}


@dataclass(kw_only=True)
class OLMo2Config(LlamaLikeConfig):
    """Config of OLMo 2; other fields are those of `LlamaLikeConfig`.

    Args:
        attn_bias: use biases on q, k, v and o.
    """

    family: ClassVar[str] = "olmo2"
    heads: ClassVar[dict[str, Head]] = llama_heads("Olmo2", classifiers=("sequence",))
    hf_names: ClassVar[dict[str, str]] = llama_names_with(attn_bias="attention_bias")
    # transformers' default, which no published checkpoint uses.
    hf_defaults: ClassVar[dict[str, Any]] = {"norm_eps": 1e-5}
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "olmo-2-1b": preset_size(2048, 8192, 16, 16, 16),
        "olmo-2-7b": {},
        "olmo-2-13b": preset_size(5120, 13824, 40, 40, 40),
        "olmo-2-32b": preset_size(5120, 27648, 64, 40, 8),
    }
    hub_ids: ClassVar[dict[str, str]] = {
        "olmo-2-1b": "allenai/OLMo-2-0425-1B",
        "olmo-2-7b": "allenai/OLMo-2-1124-7B",
        "olmo-2-13b": "allenai/OLMo-2-1124-13B",
        "olmo-2-32b": "allenai/OLMo-2-0325-32B",
    }

    vocab_size: int = 100352
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_layers: int = 32
    num_heads: int = 32
    max_seq_len: int = 4096
    norm_eps: float = 1e-6
    rope_theta: float = 500000.0
    attn_bias: bool = False


@dataclass(kw_only=True)
class OLMo3Config(LocalRotaryConfig):
    """Config of OLMo 3; other fields are those of `LocalRotaryConfig`.

    Args:
        attn_bias: use biases on q, k, v and o.
    """

    family: ClassVar[str] = "olmo3"
    full_every: ClassVar[int] = 4
    default_theta: ClassVar[float] = 500000.0
    default_local_theta: ClassVar[float] = 500000.0
    heads: ClassVar[dict[str, Head]] = llama_heads("Olmo3", classifiers=("sequence",))
    hf_names: ClassVar[dict[str, str]] = llama_names_with(attn_bias="attention_bias")
    hf_defaults: ClassVar[dict[str, Any]] = {"norm_eps": 1e-5}
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "olmo-3-7b": {
            "rope_scaling": {
                "kind": "yarn",
                "factor": 8.0,
                "attention_factor": 1.2079441541679836,
                "original_seq_len": 8192,
            }
        },
    }
    hub_ids: ClassVar[dict[str, str]] = {"olmo-3-7b": "allenai/Olmo-3-1025-7B"}

    vocab_size: int = 100278
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_layers: int = 32
    num_heads: int = 32
    max_seq_len: int = 65536
    norm_eps: float = 1e-6
    rope_theta: float = 500000.0
    local_rope_theta: float = 500000.0
    attn_bias: bool = False


class OLMo2(LlamaLike):
    """OLMo 2 with a language-model head."""

    config_class: ClassVar[type[LlamaLikeConfig]] = OLMo2Config

    @classmethod
    def make_block(cls, config: Any) -> BlockSpec:
        """Return the spec of Llama's block with the norms of OLMo 2."""
        block = super().make_block(config)
        assert block.attn is not None
        attn = replace(block.attn, qk_norm=NormSpec("rms", config.norm_eps), qk_norm_whole=True)
        return replace(block, attn=attn, norm_place="output")

    def tensor_parallel_rules(self) -> tuple[TensorParallelRule, ...]:
        """Return the tensor-parallel plan: MLP, embedding and head; attention is replicated."""
        return whole_attention(super().tensor_parallel_rules())

    def weight_rules(self) -> list[WeightRule]:
        """Map parameter names to transformers' names; norms follow the sublayers."""
        return rules_with_norms(_OUTPUT_NORMS)


class OLMo3(OLMo2, LayerTypes):
    """OLMo 3 with a language-model head."""

    config_class = OLMo3Config

"""InternLM3 (Shanghai AI Laboratory, 2025): Llama with other config fields for biases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from bmforge.models.heads import Head
from bmforge.models.llama_like import LlamaLike, LlamaLikeConfig, llama_heads, llama_names_with

__all__ = ["InternLM3", "InternLM3Config"]


@dataclass(kw_only=True)
class InternLM3Config(LlamaLikeConfig):
    """Config of InternLM3; other fields are those of `LlamaLikeConfig`.

    Args:
        attn_bias: use biases on q, k, v and o.
        mlp_bias: use biases in the MLP.
    """

    family: ClassVar[str] = "internlm3"
    heads: ClassVar[dict[str, Head]] = llama_heads("Llama", "transformer.", alias="InternLM3")
    hf_names: ClassVar[dict[str, str]] = llama_names_with(
        head_dim="head_dim", attn_bias="attention_bias", mlp_bias="mlp_bias"
    )
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "internlm3-8b": {
            "rope_theta": 5e7,
            "rope_scaling": {"kind": "dynamic", "factor": 6.0},
        },
    }
    hub_ids: ClassVar[dict[str, str]] = {"internlm3-8b": "internlm/internlm3-8b-instruct"}

    vocab_size: int = 128512
    hidden_size: int = 4096
    intermediate_size: int = 10240
    num_layers: int = 48
    num_heads: int = 32
    num_kv_heads: int = 2
    head_dim: int = 128
    max_seq_len: int = 32768
    norm_eps: float = 1e-5
    attn_bias: bool = False
    mlp_bias: bool = False

    def problems(self) -> Iterator[str]:
        """Yield a message for each inconsistency among the fields."""
        yield from super().problems()
        if self.attn_bias != self.mlp_bias:  # transformers' implementation has one field for both
            yield f"attn_bias={self.attn_bias} and mlp_bias={self.mlp_bias} must be equal"

    @classmethod
    def _read_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        for published, own in (("qkv_bias", "attention_bias"), ("bias", "mlp_bias")):
            if published in raw:  # fields of the remote code
                raw[own] = raw.pop(published)
        return super()._read_special(raw)


class InternLM3(LlamaLike):
    """InternLM3 with a language-model head."""

    config_class = InternLM3Config

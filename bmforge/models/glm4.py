"""GLM-4 dense, 0414 and before (Team GLM, "ChatGLM", arXiv 2406.12793).

The block is Llama's with interleaved RoPE on half of each head's dims, and biases on q, k and v;
checkpoints fuse gate and up. The models of April 2025 also have norms after the sublayers. GLM-10B
(2021) is the family `GLM`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from bmforge.models.causal_lm import DecoderSpec
from bmforge.models.glm import is_glm10b
from bmforge.models.heads import Head
from bmforge.models.llama_like import (
    LlamaLike,
    PartialRotaryConfig,
    gate_up_rules,
    llama_heads,
    llama_names_with,
    rules_with_norms,
)
from bmforge.models.weights import WeightRule
from bmforge.nn import BlockSpec

__all__ = ["GLM4", "GLM4Config"]


@dataclass(kw_only=True)
class GLM4Config(PartialRotaryConfig):
    """Config of GLM-4; other fields are those of `PartialRotaryConfig`.

    Args:
        model_type: "glm4", or "glm" for models without norms after the sublayers.
        qkv_bias: use biases on q, k and v.
    """

    family: ClassVar[str] = "glm4"
    model_types: ClassVar[tuple[str, ...]] = ("glm4", "glm")
    default_part: ClassVar[float] = 0.5
    heads: ClassVar[dict[str, Head]] = llama_heads(
        "Glm4", classifiers=("sequence", "token"), alias="Glm"
    )
    hf_names: ClassVar[dict[str, str]] = llama_names_with(
        model_type="model_type", head_dim="head_dim", qkv_bias="attention_bias"
    )
    # transformers' defaults, which differ from the newer published checkpoints.
    hf_defaults: ClassVar[dict[str, Any]] = {"norm_eps": 0.00000015625, "max_seq_len": 131072}
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "glm-4-9b": {
            "model_type": "glm",
            "norm_eps": 0.00000015625,
            "max_seq_len": 8192,
        },
        "glm-4-9b-0414": {},
        "glm-4-32b-0414": {
            "hidden_size": 6144,
            "intermediate_size": 23040,
            "num_layers": 61,
            "num_heads": 48,
            "qkv_bias": False,
        },
    }
    hub_ids: ClassVar[dict[str, str]] = {
        "glm-4-9b": "zai-org/glm-4-9b-hf",
        "glm-4-9b-0414": "zai-org/GLM-4-9B-0414",
        "glm-4-32b-0414": "zai-org/GLM-4-32B-0414",
    }

    model_type: Literal["glm4", "glm"] = "glm4"
    vocab_size: int = 151552
    hidden_size: int = 4096
    intermediate_size: int = 13696
    num_layers: int = 40
    num_heads: int = 32
    num_kv_heads: int = 2
    head_dim: int = 128
    max_seq_len: int = 32768
    norm_eps: float = 1e-5
    rotary_part: float = 0.5
    qkv_bias: bool = True

    @classmethod
    def opens(cls, raw: dict[str, Any]) -> bool:
        """Return True for a config.json of GLM-4; GLM-10B's has the same model_type."""
        return super().opens(raw) and not is_glm10b(raw)

    def _write_head(self) -> dict[str, Any]:
        out = super()._write_head()
        if self.model_type == "glm":
            out["architectures"] = [n.replace("Glm4", "Glm") for n in out["architectures"]]
        return out


class GLM4(LlamaLike):
    """GLM-4 with a language-model head."""

    config_class = GLM4Config

    @classmethod
    def make_block(cls, config: GLM4Config) -> BlockSpec:
        """Return Llama's block with GLM-4's biases, rotary pairs and norms."""
        block = super().make_block(config)
        assert block.attn is not None
        attn = replace(block.attn, qkv_bias=config.qkv_bias, rope_interleaved=True)
        is_new = config.model_type == "glm4"
        return replace(block, attn=attn, norm_place="sandwich" if is_new else "pre")

    @classmethod
    def make_spec(cls, config: GLM4Config) -> DecoderSpec:
        """Return the `DecoderSpec` of the model."""
        return replace(super().make_spec(config), rope=config.rope_spec(interleaved=True))

    def weight_rules(self) -> list[WeightRule]:
        """Map parameter names to transformers' names; gate and up are fused."""
        norms = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
        if self.config.model_type == "glm4":
            norms |= {
                "attn_out_norm": "post_self_attn_layernorm",
                "mlp_out_norm": "post_mlp_layernorm",
            }
        split = (".gate_proj.weight", ".up_proj.weight")
        rules = [rule for rule in rules_with_norms(norms) if not rule.parameter.endswith(split)]
        return [*rules, *gate_up_rules(self.config.intermediate_size)]

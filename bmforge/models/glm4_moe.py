"""GLM-4.5 and GLM-4.6 (Z.ai, "GLM-4.5", arXiv 2508.06471).

They have grouped-query attention with RoPE on half of each head's dims, and DeepSeek-V3's experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from bmforge.models.heads import Head
from bmforge.models.llama import llama_heads
from bmforge.models.llama_like import PartialRotaryConfig
from bmforge.models.shared_experts import SHARED_EXPERT_NAMES, SharedExperts, SharedExpertsConfig
from bmforge.nn import BlockSpec, NormSpec

__all__ = ["GLM4Moe", "GLM4MoeConfig"]

_LARGE = {
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "expert_size": 1536,
    "num_layers": 92,
    "num_experts": 160,
    "num_dense": 3,
    "weight_scale": 2.5,
    "uses_qk_norm": True,
}


@dataclass(kw_only=True)
class GLM4MoeConfig(SharedExpertsConfig, PartialRotaryConfig):
    """Config of GLM-4.5; other fields are those of `SharedExpertsConfig` and `PartialRotaryConfig`.

    Args:
        attn_bias: use biases on q, k and v.
        uses_qk_norm: normalize q and k per head.
    """

    family: ClassVar[str] = "glm4_moe"
    default_part: ClassVar[float] = 0.5
    heads: ClassVar[dict[str, Head]] = llama_heads("Glm4Moe", classifiers=())
    hf_names: ClassVar[dict[str, str]] = {
        **SHARED_EXPERT_NAMES,
        "head_dim": "head_dim",
        "uses_qk_norm": "use_qk_norm",
    }
    # transformers' defaults, which differ from the published checkpoints.
    hf_defaults: ClassVar[dict[str, Any]] = {"head_dim": 0, "attn_bias": False}
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "glm-4.5-air": {},
        "glm-4.5": _LARGE,
        "glm-4.6": {**_LARGE, "max_seq_len": 202752},
    }
    hub_ids: ClassVar[dict[str, str]] = {
        "glm-4.5-air": "zai-org/GLM-4.5-Air",
        "glm-4.5": "zai-org/GLM-4.5",
        "glm-4.6": "zai-org/GLM-4.6",
    }

    vocab_size: int = 151552
    hidden_size: int = 4096
    intermediate_size: int = 10944
    num_layers: int = 46
    num_heads: int = 96
    num_kv_heads: int = 8
    head_dim: int = 128
    max_seq_len: int = 131072
    norm_eps: float = 1e-5
    rope_theta: float = 1e6
    rotary_part: float = 0.5
    attn_bias: bool = True
    uses_qk_norm: bool = False

    def to_hf(self) -> dict[str, Any]:
        """Return the contents of config.json, without head_dim if it is hidden_size / num_heads."""
        return self.omit_head_dim(super().to_hf())


class GLM4Moe(SharedExperts):
    """GLM-4.5 with a language-model head."""

    config_class = GLM4MoeConfig

    @classmethod
    def make_block(cls, config: GLM4MoeConfig) -> BlockSpec:
        """Return the block spec without a bias on o, optionally with norms on q and k."""
        block = super().make_block(config)
        assert block.attn is not None
        norm = NormSpec("rms", config.norm_eps) if config.uses_qk_norm else None
        return replace(block, attn=replace(block.attn, out_bias=False, qk_norm=norm))

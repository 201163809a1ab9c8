"""Tiny models of every architecture that GGUF files are read and written of."""

from __future__ import annotations

from typing import Any

from bmforge.models import (
    BertConfig,
    BloomConfig,
    Cohere2Config,
    CohereConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3Config,
    GemmaConfig,
    GLM4Config,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MiniCPMConfig,
    MixtralConfig,
    Model,
    OLMo2Config,
    OLMo3Config,
    QwenConfig,
    SmolLM3Config,
    T5Config,
)
from bmforge.models.hub import FAMILIES
from bmforge.models.qwen_moe import Qwen2MoeConfig, Qwen3MoeConfig

__all__ = ["GGUF_MODELS", "build_model"]

_WIDE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 2,
    "num_heads": 4,
    "max_seq_len": 64,
}
_GROUPED = {**_WIDE, "num_kv_heads": 2, "init_std": 0.2}
_EXPERTS = {"num_experts": 3, "experts_per_token": 2, "expert_size": 32}
_LLAMA3 = {
    "kind": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_seq_len": 8192,
}
_LONG = {
    "kind": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.1 * i for i in range(8)],
    "original_seq_len": 32,
}
_YARN = {"kind": "yarn", "factor": 4.0, "original_seq_len": 32}

GGUF_MODELS: dict[str, Any] = {
    "llama": LlamaConfig(**_GROUPED),
    "llama, scaled, tied, with biases": LlamaConfig(
        **_GROUPED, tie_word_embeddings=True, attn_bias=True, mlp_bias=True, rope_scaling=_LLAMA3
    ),
    "mixtral": MixtralConfig(**_GROUPED, num_experts=3),
    "qwen2": QwenConfig(**_GROUPED, rope_theta=1e6),
    "qwen2, yarn": QwenConfig(**_GROUPED, rope_scaling=_YARN),
    "qwen3": QwenConfig(**_GROUPED, model_type="qwen3", head_dim=20, tie_word_embeddings=True),
    "qwen2moe": Qwen2MoeConfig(**_GROUPED, **_EXPERTS, shared_size=64),
    "qwen3moe": Qwen3MoeConfig(**_GROUPED, **_EXPERTS, normalize_weights=True),
    "gpt-oss": GptOssConfig(**_GROUPED, num_experts=3, experts_per_token=2, head_dim=20, window=5),
    "gpt-oss, no biases": GptOssConfig(
        **{**_GROUPED, "intermediate_size": 64},
        **{"num_experts": 3, "experts_per_token": 2, "attn_bias": False, "rope_scaling": {}},
    ),
    "minicpm": MiniCPMConfig(**_GROUPED),
    "minicpm4": MiniCPMConfig(**_GROUPED, rope_scaling=_LONG, tie_word_embeddings=False),
    "granite": GraniteConfig(**_GROUPED, attn_scale=0.2),
    "granite, biases": GraniteConfig(**_GROUPED, attn_bias=True, mlp_bias=True),
    "cohere": CohereConfig(**_GROUPED, logit_scale=0.25),
    "cohere2": Cohere2Config(**{**_GROUPED, "num_layers": 4, "window": 5}),
    "gemma": GemmaConfig(**{**_GROUPED, "head_dim": 20}),
    "gemma2": Gemma2Config(
        **{**_GROUPED, "head_dim": 20, "query_size": 20, "window": 5, "attn_softcap": 2.0}
    ),
    "gemma3": Gemma3Config(
        **{**_GROUPED, "head_dim": 20, "query_size": 20, "window": 5, "num_layers": 6},
        local_rope_theta=50.0,
        rope_scaling={"kind": "linear", "factor": 8.0},
    ),
    "olmo2": OLMo2Config(**_GROUPED, rope_theta=300.0),
    "olmo3": OLMo3Config(**{**_GROUPED, "num_layers": 4, "window": 5}, rope_scaling=_YARN),
    "smollm3": SmolLM3Config(**{**_GROUPED, "num_layers": 4}),
    "glm4": GLM4Config(**{**_GROUPED, "head_dim": 24}),
    "glm4, no biases": GLM4Config(**{**_GROUPED, "head_dim": 24}, qkv_bias=False),
    "bloom": BloomConfig(**{**_WIDE, "intermediate_size": 256}, init_std=0.2),
    "gptneox": GPTNeoXConfig(**_WIDE, init_std=0.2, rotary_part=0.5),
    "gptneox, sequential": GPTNeoXConfig(
        **_WIDE, init_std=0.2, parallel_residual=False, attn_bias=False
    ),
    "falcon": FalconConfig(**_WIDE, init_std=0.2, num_kv_heads=1),
    "falcon, grouped": FalconConfig(
        **_GROUPED, new_decoder_architecture=True, bias=True, tie_word_embeddings=False
    ),
    "falcon, two norms": FalconConfig(
        **_GROUPED, new_decoder_architecture=True, parallel_norms=True
    ),
    "gpt2": GPT2Config(**_WIDE, init_std=0.2),
    "gptj": GPTJConfig(**_WIDE, rotary_dim=4, init_std=0.2),
    "t5": T5Config(**_WIDE, head_dim=12, num_buckets=16, num_decoder_layers=1),
    "t5 1.1": T5Config(
        **_WIDE, head_dim=12, feed_forward="gated-gelu", tie_word_embeddings=False, scale_head=False
    ),
    "bert": BertConfig(**_WIDE, init_std=0.2, head="none"),
}


def build_model(name: str) -> Any:
    """Return a model with weights."""
    config = GGUF_MODELS[name]
    family: type[Model] = next(f for f in FAMILIES.values() if f.config_class is type(config))
    return family.from_config(config).eval()

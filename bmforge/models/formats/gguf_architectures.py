"""Table of the supported GGUF architectures, with their metadata keys.

Source: ``constants.py`` of the ``gguf`` package (Keys), and llama.cpp's ``convert_hf_to_gguf.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["ARCHITECTURES", "CAPS", "LAYER_NORM", "Architecture"]

_WIDTHS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_RMS = "attention.layer_norm_rms_epsilon"
LAYER_NORM = "attention.layer_norm_epsilon"
_ROTARY = {**_WIDTHS, "attention.head_count_kv": "num_key_value_heads", _RMS: "rms_norm_eps"}
_WIDE = {**_ROTARY, "attention.key_length": "head_dim"}
_WINDOWS = {**_WIDE, "attention.sliding_window": "sliding_window"}
_COHERE = {
    **_WIDTHS,
    "attention.head_count_kv": "num_key_value_heads",
    LAYER_NORM: "layer_norm_eps",
    "logit_scale": "logit_scale",
}
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_MOE = {**_WIDE, "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_GPT = {
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    LAYER_NORM: "layer_norm_epsilon",
}
_T5 = {
    "context_length": "n_positions",
    "embedding_length": "d_model",
    "feed_forward_length": "d_ff",
    "block_count": "num_layers",
    "decoder_block_count": "num_decoder_layers",
    "attention.head_count": "num_heads",
    "attention.key_length": "d_kv",
    "attention.relative_buckets_count": "relative_attention_num_buckets",
    _RMS: "layer_norm_epsilon",
    "decoder_start_token_id": "decoder_start_token_id",
}
# config.json field -> (tensor name, dim) whose size is the field's value
_Sizes = dict[str, tuple[str, int]]


@dataclass(frozen=True)
class Architecture:
    """Maps a GGUF architecture to a bmforge family.

    Args:
        name: bmforge's name; equals GGUF's `general.architecture`, except for Mixtral ("llama"
            in GGUF), OLMo 3 ("olmo2") and Cohere ("command-r").
        kind: `general.architecture`.
        raw: fields of config.json that the architecture implies.
        keys: mapping from metadata key, without the architecture, to field of config.json.
        sizes: mapping from field of config.json to the tensor dim that determines its value.
        required: mapping from metadata key to the only supported value.
        permutes: True if the rows of query and key are permuted; see `gguf_names.is_permuted`.
        rotary: True if the architecture uses RoPE with a configurable base.
        norm_offset: offset that files add to the weights of norms.
        local_base: True if `rope.freq_base_swa` is the rotary base of sliding-window layers.
    """

    name: str
    kind: str
    raw: dict[str, Any]
    keys: dict[str, str]
    sizes: _Sizes = field(default_factory=dict)
    required: dict[str, Any] = field(default_factory=dict)
    permutes: bool = False
    rotary: bool = True
    norm_offset: float = 0.0
    local_base: bool = False


def _raw(model_type: str, stem: str, **more: Any) -> dict[str, Any]:
    return {"model_type": model_type, "architectures": [f"{stem}ForCausalLM"], **more}


_EXPERT = ("blk.0.ffn_up_exps.weight", 1)
_SHARED = ("blk.0.ffn_up_shexp.weight", 0)
_LIST = (
    Architecture("llama", "llama", _raw("llama", "Llama"), _WIDE, permutes=True),
    Architecture(
        "mixtral",
        "llama",
        _raw("mixtral", "Mixtral"),
        {**_WIDE, "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        permutes=True,
    ),
    Architecture("qwen2", "qwen2", _raw("qwen2", "Qwen2"), _WIDE),
    Architecture("qwen3", "qwen3", _raw("qwen3", "Qwen3"), _WIDE),
    Architecture(
        "qwen2moe",
        "qwen2moe",
        _raw("qwen2_moe", "Qwen2Moe", norm_topk_prob=False),
        _MOE,
        {"moe_intermediate_size": _EXPERT, "shared_expert_intermediate_size": _SHARED},
    ),
    Architecture(
        "qwen3moe",
        "qwen3moe",
        _raw("qwen3_moe", "Qwen3Moe", norm_topk_prob=True),
        _MOE,
        {"moe_intermediate_size": _EXPERT},
    ),
    Architecture(
        "gpt-oss",
        "gpt-oss",
        _raw("gpt_oss", "GptOss"),
        {
            **_WINDOWS,
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
        },
        {"intermediate_size": _EXPERT},
    ),
    Architecture(
        "minicpm",
        "minicpm",
        _raw("minicpm", "MiniCPM"),
        {
            **_ROTARY,
            "embedding_scale": "scale_emb",
            "residual_scale": "scale_depth",
            "logit_scale": "dim_model_base",
        },
        permutes=True,
    ),
    Architecture(
        "granite",
        "granite",
        _raw("granite", "Granite"),
        {
            **_ROTARY,
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        permutes=True,
    ),
    Architecture("cohere", "command-r", _raw("cohere", "Cohere"), _COHERE),
    Architecture(
        "cohere2",
        "cohere2",
        _raw("cohere2", "Cohere2"),
        {**_COHERE, "attention.sliding_window": "sliding_window"},
    ),
    Architecture("smollm3", "smollm3", _raw("smollm3", "SmolLM3"), _ROTARY, permutes=True),
    Architecture("olmo2", "olmo2", _raw("olmo2", "Olmo2"), _ROTARY),
    Architecture(
        "olmo3",
        "olmo2",
        _raw("olmo3", "Olmo3"),
        {**_ROTARY, "attention.sliding_window": "sliding_window"},
    ),
    Architecture("glm4", "glm4", _raw("glm4", "Glm4"), _WIDE),
    Architecture(
        "gptneox",
        "gptneox",
        _raw("gpt_neox", "GPTNeoX"),
        {
            **_WIDTHS,
            LAYER_NORM: "layer_norm_eps",
            "use_parallel_residual": "use_parallel_residual",
        },
    ),
    Architecture(
        "falcon",
        "falcon",
        _raw("falcon", "Falcon", alibi=False),
        {
            **_WIDTHS,
            "feed_forward_length": "ffn_hidden_size",
            "attention.head_count_kv": "num_key_value_heads",
            LAYER_NORM: "layer_norm_epsilon",
        },
    ),
    Architecture("gemma", "gemma", _raw("gemma", "Gemma"), _WIDE, norm_offset=1.0),
    Architecture(
        "gemma2",
        "gemma2",
        _raw("gemma2", "Gemma2"),
        {**_WINDOWS, **{name: name for name in CAPS}},
        norm_offset=1.0,
    ),
    Architecture(
        "gemma3",
        "gemma3",
        _raw("gemma3_text", "Gemma3"),
        _WINDOWS,
        norm_offset=1.0,
        local_base=True,
    ),
    Architecture(
        "bloom",
        "bloom",
        _raw("bloom", "Bloom"),
        {
            "context_length": "seq_length",
            "embedding_length": "hidden_size",
            "block_count": "n_layer",
            "feed_forward_length": "intermediate_size",
            "attention.head_count": "n_head",
            LAYER_NORM: "layer_norm_epsilon",
        },
        rotary=False,
    ),
    Architecture(
        "gpt2",
        "gpt2",
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
        _GPT,
        rotary=False,
    ),
    Architecture(
        "gptj",
        "gptj",
        _raw("gptj", "GPTJ"),
        {**_GPT, "rope.dimension_count": "rotary_dim"},
        required={"rope.freq_base": 10000.0},
        rotary=False,
    ),
    Architecture(
        "t5",
        "t5",
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
        _T5,
        rotary=False,
    ),
    Architecture(
        "bert",
        "bert",
        {"model_type": "bert", "architectures": ["BertModel"]},
        {**_WIDTHS, LAYER_NORM: "layer_norm_eps"},
        {"type_vocab_size": ("token_types.weight", 0)},
        required={"attention.causal": False},
        rotary=False,
    ),
)
ARCHITECTURES = {entry.name: entry for entry in _LIST}

"""Builds a small copy of a transformers model, with random weights; used by `probe.py`.

Whether an architecture keeps packed documents apart in attention, and which of its layers it never
calls, depends on its code and config flags, not on its sizes. A small copy shows this in
milliseconds, before weights are loaded, and with the same result on every rank of any parallel
layout.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bmforge.errors import ConfigError
from bmforge.models.transformers.build import find_class, fit_config
from bmforge.models.transformers.library import load_library, strict_error

__all__ = ["LAYERS", "VOCABULARY", "build_small_copy", "shrink_config"]

VOCABULARY, LAYERS = 160, 4
# Larger copies take seconds and hundreds of MB: a size of the config is not in the table below.
_MOST_ELEMENTS = 1 << 27
_SPECIAL_IDS = 10  # the last ids of the vocabulary replace special tokens
_HEADS, _KV_HEADS = 4, 2
# Size in the small copy -> fields of transformers configs that get this size.
_SIZES: dict[int, str] = {
    64: "hidden_size n_embd d_model dim embed_dim model_dim word_embed_proj_dim embedding_size "
    "emb_dim hidden_dim lru_width attention_hidden_size embedding_dim hidden_size_global "
    "out_hidden_size text_hidden_size encoder_hidden_size vision_hidden_size projection_dim "
    "projector_hidden_size projection_hidden_dim projection_hidden_size adapter_in_dim "
    "adapter_out_dim adapter_input_size d_latents entity_emb_size "
    "pooler_hidden_size audio_hidden_size cross_hidden_size decoder_hidden_size "
    "post_conv_out_channels projector_output_dim vision_output_dim upsample_groups",
    192: "intermediate_size ffn_dim n_inner d_ff encoder_ffn_dim decoder_ffn_dim ffn_hidden_size "
    "feed_forward_proj_dim dim_feedforward intermediate_size_mlp dense_intermediate_size",
    LAYERS: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers "
    "num_decoder_layers depth num_experts num_local_experts n_routed_experts moe_num_experts "
    "linear_num_value_heads mamba_n_heads mamba_num_heads num_attention_heads n_head n_heads "
    "num_heads encoder_attention_heads decoder_attention_heads attention_heads laurel_rank "
    "swa_num_attention_heads num_attention_heads_per_layer linear_num_heads num_blocks "
    "cross_num_attention_heads cross_num_key_value_heads index_kpool num_filters",
    2: "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts num_selects "
    "moe_top_k experts_per_token index_n_heads linear_num_key_heads mamba_expand altup_num_inputs "
    "swa_num_key_value_heads indexer_n_heads indexer_compress_ratio heads_per_ngram "
    "split_ngram_parts n_layers_per_attn_res_block",
    32: "hidden_size_per_layer_input moe_intermediate_size expert_ffn_hidden_size "
    "shared_expert_intermediate_size moe_shared_expert_intermediate_size "
    "shared_intermediate_size shared_experts_intermediate_size moe_ffn_hidden_size q_lora_rank "
    "kv_lora_rank mamba_d_head mamba_head_dim time_step_rank mamba_dt_rank image_size "
    "base_channels hc_lowrank",
    16: "head_dim kv_channels attention_head_dim d_kv swa_head_dim global_head_dim v_head_dim "
    "qk_head_dim index_head_dim linear_key_head_dim linear_value_head_dim mamba_chunk_size "
    "chunk_size sliding_window attention_window_size window_size query_pre_attn_scalar "
    "linear_head_dim sliding_window_size local_attention_window_len indexer_head_dim "
    "mm_tokens_per_image cross_head_dim",
    8: "qk_nope_head_dim qk_rope_head_dim index_topk mamba_d_state ssm_state_size state_size "
    "patch_size indexer_budget",
    1: "n_group topk_group first_k_dense_replace num_dense_layers mamba_n_groups n_groups "
    "num_hidden_groups num_expert_group",
    128: "max_position_embeddings n_positions n_ctx seq_length max_sequence_length mamba_d_ssm "
    "max_target_positions max_source_positions",
    VOCABULARY: "vocab_size vocab_size_per_layer_input decoder_vocab_size unpadded_vocab_size "
    "encoder_hash_byte_group_vocab ngram_vocab_size_base entity_vocab_size",
    3: "num_channels",
    0: "num_kv_shared_layers",
}
_BY_FIELD = {name: size for size, names in _SIZES.items() for name in names.split()}
_KV_FIELDS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_HEAD_FIELDS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_KIND_LISTS = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types")
_PER_LAYER = (*_KIND_LISTS, "no_rope_layers", "attention_layers", "_block_types")
_LAYER_LISTS = (*_KIND_LISTS, "no_rope_layers", "attention_layers", "moe_layers", "_block_types")
_DROPOUT = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "router_jitter_noise")
# model_type -> fields that must match the small sizes above and are not derived from them.
_SPECIAL: dict[str, dict[str, Any]] = {
    "xlnet": {"d_head": 16},
    "deepseek_v2": {"head_dim": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "bailing_hybrid": {"topk_group": 1},
    "apertus1p5": {"image_token_offset": 16, "audio_token_offset": 80},
    "apertus1p5_vision_tokenizer": {"codebook_size": 64},
    "wavtokenizer_encoder": {"codebook_size": 64, "codebook_dim": 64},
    "chameleon_vqgan": {"num_embeddings": 4},
    "emu3_vqgan": {"codebook_size": 4},
    "dia_decoder": {"num_channels": 9},
    "fun_asr_nano": {
        "adaptor_config": {
            "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 16,
            "projector_hidden_size": 64,
        },
    },
    "fun_asr_nano_encoder": {"num_mel_bins": 32},
    "kosmos-2": {"latent_query_num": 4},
    "mistral_large4_text": {"kv_source_layers": [0, 1, 2, 3]},
    "step3p5_vision": {"mlp_ratio": 3.0},
    "llama4_vision_model": {"intermediate_size": 256, "projector_input_dim": 64},
    "molmo2_adapter": {"vision_feature_layer": [3, 1]},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "hrm_text": {
        "num_layers_per_stack": 2, "num_hidden_layers": 12, "H_cycles": 2, "L_cycles": 2,
    },
    "zaya": {"num_experts_per_tok": 1},
    "layoutlmv3": {"coordinate_size": 12, "shape_size": 8},
    "lilt": {"hidden_size": 96},
    "mobilebert": {"embedding_size": 32},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "longcat_flash": {
        "num_layers": 2, "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2,
    },
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "dots1": {
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1,
    },
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 32},
    "zamba": {
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "attention_hidden_size": 128,
        "attention_head_dim": 32, "num_key_value_heads": 4, "n_mamba_heads": 2,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "mamba_headdim": 32,
        "num_key_value_heads": 4, "attention_hidden_size": 128, "attention_head_dim": 32,
        "n_mamba_heads": 4, "mamba_ngroups": 1, "use_shared_attention_adapter": False,
        "hybrid_layer_ids": [1, 3],
    },
    "reformer": {
        "is_decoder": True, "attn_layers": ["local", "lsh", "local", "lsh"],
        "axial_pos_shape": [8, 16], "axial_pos_embds_dim": [32, 32], "attention_head_size": 16,
        "num_buckets": 4, "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4,
        "feed_forward_size": 192, "hash_seed": 0,
    },
}  # fmt: skip


def shrink_config(hf_config: Any) -> Any:
    """Return a copy of a transformers config with small sizes and without dropout.

    Every layer type remains, and multi-head or multi-query attention remains what it is.
    """
    small = _shrink_(copy.deepcopy(hf_config))
    base = type(hf_config)
    parts = {
        name: value
        for name, value in vars(small).items()
        if not name.startswith("_") and name not in ("transformers_version", "dtype")
    }
    library = load_library()
    for name, value in parts.items():
        if isinstance(value, library.PretrainedConfig):
            parts[name] = shrink_config(getattr(hf_config, name))
    parts.update(_SPECIAL.get(str(hf_config.model_type), {}))
    try:  # the constructor derives fields from the sizes
        shrunk = base(**parts)
    except (TypeError, ValueError, KeyError, AttributeError, strict_error()):
        shrunk = small
        for name, value in _SPECIAL.get(str(hf_config.model_type), {}).items():
            setattr(shrunk, name, value)
    _drop_dropout_(shrunk)
    return shrunk


def _shrink_(config: Any) -> Any:
    values = vars(config)
    library = load_library()
    for name, value in list(_smaller(values)):
        try:
            setattr(config, name, value)
        except (ValueError, TypeError, AttributeError):
            values[name] = value
    for value in values.values():
        if isinstance(value, library.PretrainedConfig):
            _shrink_(value)
    return config


def _smaller(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the name and the new value of each config field to make smaller."""
    heads = next((values[n] for n in _HEAD_FIELDS if isinstance(values.get(n), int)), None)
    layers = values.get("num_hidden_layers") or values.get("depth") or LAYERS
    ropes = values.get("qk_rope_head_dim")  # some configs repeat it as head_dim
    is_rope = ropes is not None and ropes == values.get("head_dim")
    width = _BY_FIELD["qk_rope_head_dim" if is_rope else "head_dim"]
    for name, value in values.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if name in _KV_FIELDS and is_number and heads:
            yield name, _HEADS if value == heads else 1 if value == 1 else _KV_HEADS
        elif name == "head_dim" and is_number and value:
            yield name, width
        elif name in _BY_FIELD and is_number and value:  # 0 means that the model has no such part
            yield name, _BY_FIELD[name]
        elif isinstance(value, (list, tuple)) and len(value) == layers and layers > LAYERS:
            short = _first_of_each(list(value), True)
            yield name, [_BY_FIELD[name]] * LAYERS if name in _BY_FIELD else short
        elif name in _LAYER_LISTS and isinstance(value, (list, tuple)) and len(value) > LAYERS:
            yield name, _first_of_each(list(value), name in (*_KIND_LISTS, "no_rope_layers"))
        elif name in _PER_LAYER and isinstance(value, (list, tuple)) and 0 < len(value) < LAYERS:
            yield name, (list(value) * LAYERS)[:LAYERS]  # fewer entries than layers
        elif isinstance(value, dict) and "mrope_section" in value:
            yield name, {**value, "mrope_section": _shrink_sections(value, width)}
        elif name.endswith(("_indexes", "_indices")) and isinstance(value, (list, tuple)):
            yield name, sorted({number * LAYERS // layers for number in value})
        elif name.endswith(("token_id", "token_index")):
            yield name, _small_id(name, value)


def _first_of_each(values: list[Any], keeps_kinds: bool) -> list[Any]:
    """Return the first `LAYERS` values of a config field that has one value per layer.

    With `keeps_kinds`, values that occur only in later layers replace the last of these values, so
    that the small copy has every kind of layer.
    """
    short = values[:LAYERS]
    missing: list[Any] = []  # values may be lists, which have no hash
    for value in values:
        if value not in short and value not in missing:
            missing.append(value)
    if keeps_kinds:
        for number, value in enumerate(missing[: LAYERS - 1]):
            short[LAYERS - 1 - number] = value
    return short


def _shrink_sections(rope: dict[str, Any], width: int) -> list[int]:
    """Scale the `mrope_section` of a multimodal RoPE to heads of `width` dims."""
    sections = rope["mrope_section"]
    pairs = int(width * rope.get("partial_rotary_factor", 1.0)) // 2
    total = sum(sections)
    short = [max(1, (2 * size * pairs + total - 1) // (2 * total)) for size in sections[1:]]
    return [pairs - sum(short), *short]


def _small_id(name: str, value: Any) -> Any:
    usual = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}.get(name)
    if isinstance(value, int):
        if usual is None:  # ids of one model, such as those of images and videos, stay different
            usual = VOCABULARY - _SPECIAL_IDS + value % _SPECIAL_IDS
        return value if value < VOCABULARY else usual
    if isinstance(value, (list, tuple)) and any(v is not None and v >= VOCABULARY for v in value):
        return usual
    return value


def _drop_dropout_(config: Any) -> None:
    for name, value in list(vars(config).items()):
        is_dropout = "dropout" in name or name.endswith("_pdrop") or name in _DROPOUT
        if is_dropout and isinstance(value, float):
            vars(config)[name] = 0.0
        elif isinstance(value, load_library().PretrainedConfig):
            _drop_dropout_(value)


class _LimitedSize(TorchFunctionMode):
    """Mode that raises an error if a model has more than `_MOST_ELEMENTS` parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Count the elements of each tensor that a layer allocates."""
        out = func(*args, **(kwargs or {}))
        if func is torch.empty:
            self.elements += out.numel()
            if self.elements > _MOST_ELEMENTS:
                raise ConfigError(
                    f"the small copy that tests the architecture has more than {_MOST_ELEMENTS} "
                    "parameters, because bmforge does not know a size field of its config."
                )
        return out


def build_small_copy(hf_config: Any, head: str, seed: int = 0) -> Any:
    """Build a small copy of a transformers model, in fp32 on the CPU, in eval mode.

    Args:
        hf_config: transformers config of the model.
        head: key of `library.AUTO_CLASSES`.
        seed: random seed of the weights.

    Raises:
        Exception: any error of transformers, if the architecture cannot be built with small sizes.
    """
    config = shrink_config(hf_config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        chosen = find_class(config, head)
        with _LimitedSize():
            small_copy = chosen._from_config(fit_config(config, chosen), dtype=torch.float32)
        for parameter in small_copy.parameters():
            # A zero-initialized layer would hide the effect of its input.
            if parameter.numel() and not bool(parameter.detach().any()):
                parameter.data.normal_(0, 0.02)
    for part in {id(c): c for c in (config, config.get_text_config(decoder=True))}.values():
        try:
            part.eos_token_id = None
        except strict_error():  # this config must have one
            part.eos_token_id = -1
    return small_copy.eval()

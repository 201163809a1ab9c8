"""Tiny models and processors of further vision-language architectures, for long tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vision_models import TEXT, TOWER, make_tokenizer

from bmforge.infer.processor import without_videos

__all__ = ["MORE_KINDS", "build_vision_model"]

_SQUARE = {"height": 28, "width": 28}
_PINPOINTS = [[28, 56], [56, 28], [56, 56]]
_ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
_QWEN_MARK = "<|vision_start|><|image_pad|><|vision_end|>"
Built = tuple[Any, Any, str]


def _qwen_ids(ids: dict[str, int]) -> dict[str, int]:
    return {
        "image_token_id": ids["<|image_pad|>"], "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }  # fmt: skip


def _qwen2_vl(lib: Any, tokenizer: Any, ids: dict[str, int], text: dict[str, Any]) -> Built:
    tower = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2}
    config = lib.Qwen2VLConfig(
        text_config={**text, "rope_parameters": _ROPE}, vision_config=tower, **_qwen_ids(ids)
    )
    images = lib.Qwen2VLImageProcessorPil(size={"shortest_edge": 784, "longest_edge": 56 * 84})
    return config, without_videos(lib.Qwen2VLProcessor)(images, tokenizer), _QWEN_MARK


def _qwen3_vl(lib: Any, tokenizer: Any, ids: dict[str, int], text: dict[str, Any]) -> Built:
    tower = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4,
        "out_hidden_size": 32, "patch_size": 14, "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }  # fmt: skip
    config = lib.Qwen3VLConfig(
        text_config={**text, "head_dim": 8, "rope_parameters": _ROPE},
        vision_config=tower,
        **_qwen_ids(ids),
    )
    images = lib.Qwen2VLImageProcessorPil(size={"shortest_edge": 784, "longest_edge": 56 * 84})
    return config, without_videos(lib.Qwen3VLProcessor)(images, tokenizer), _QWEN_MARK


def _llava_onevision(lib: Any, tokenizer: Any, ids: dict[str, int], text: dict[str, Any]) -> Built:
    points = [[28, 28], *_PINPOINTS]
    config = lib.LlavaOnevisionConfig(
        text_config={**text, "model_type": "qwen2"},
        vision_config={**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False},
        image_token_index=ids["<image>"],
        video_token_index=ids["<video>"],
        image_grid_pinpoints=points,
    )
    images = lib.LlavaOnevisionImageProcessorPil(size=_SQUARE, image_grid_pinpoints=points)
    processor = without_videos(lib.LlavaOnevisionProcessor)(
        images, tokenizer, num_image_tokens=4, vision_feature_select_strategy="full"
    )
    return config, processor, "<image>"


def _llava_next(lib: Any, tokenizer: Any, ids: dict[str, int], text: dict[str, Any]) -> Built:
    config = lib.LlavaNextConfig(
        text_config={**text, "model_type": "llama"},
        vision_config={**TOWER, "model_type": "clip_vision_model"},
        image_token_index=ids["<image>"],
        image_grid_pinpoints=_PINPOINTS,
    )
    images = lib.LlavaNextImageProcessorPil(
        size={"shortest_edge": 28}, crop_size=_SQUARE, image_grid_pinpoints=_PINPOINTS
    )
    processor = lib.LlavaNextProcessor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )  # fmt: skip
    return config, processor, "<image>"


def _internvl(lib: Any, tokenizer: Any, ids: dict[str, int], text: dict[str, Any]) -> Built:
    config = lib.InternVLConfig(
        text_config={**text, "model_type": "qwen2"},
        vision_config={**TOWER, "image_size": [28, 28], "patch_size": [14, 14]},
        image_token_id=ids["<IMG_CONTEXT>"],
        downsample_ratio=0.5,
    )
    images = lib.GotOcr2ImageProcessorPil(size=_SQUARE, crop_to_patches=True, max_patches=2)
    processor = without_videos(lib.InternVLProcessor)(images, tokenizer, image_seq_length=1)
    return config, processor, "<IMG_CONTEXT>"


def _paligemma(lib: Any, tokenizer: Any, ids: dict[str, int], text: dict[str, Any]) -> Built:
    config = lib.PaliGemmaConfig(
        text_config={**text, "model_type": "gemma", "head_dim": 8},
        vision_config={
            **TOWER, "model_type": "siglip_vision_model", "projection_dim": 32,
            "vision_use_head": False,
        },
        image_token_index=ids["<image>"],
        projection_dim=32,
        tie_word_embeddings=False,
    )  # fmt: skip
    images = lib.SiglipImageProcessorPil(size=_SQUARE)
    images.image_seq_length = 4
    return config, lib.PaliGemmaProcessor(images, tokenizer), "<image>"


def _mllama(lib: Any, tokenizer: Any, ids: dict[str, int], text: dict[str, Any]) -> Built:
    rope = {"rope_type": "default", "rope_theta": 1e4}
    config = lib.MllamaConfig(
        text_config={
            **text, "cross_attention_layers": [1], "num_hidden_layers": 3, "rope_parameters": rope,
        },
        vision_config={
            **TOWER, "attention_heads": 4, "num_global_layers": 1, "max_num_tiles": 2,
            "intermediate_layers_indices": [0], "vision_output_dim": 64,
            "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
        },
        image_token_index=ids["<|image|>"],
    )  # fmt: skip
    images = lib.MllamaImageProcessorPil(size=_SQUARE, max_image_tiles=2)
    return config, lib.MllamaProcessor(images, tokenizer), "<|image|>"


MORE_KINDS: dict[str, Callable[..., Built]] = {
    "qwen2_vl": _qwen2_vl,
    "qwen3_vl": _qwen3_vl,
    "llava_onevision": _llava_onevision,
    "llava_next": _llava_next,
    "internvl": _internvl,
    "paligemma": _paligemma,
    "mllama": _mllama,
}


def build_vision_model(kind: str) -> Built:
    """Return the config of a tiny model, its processor, and the text that marks an image."""
    import transformers

    extra = {
        "start_image_token": "<img>", "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>", "video_token": "<video>",
    }  # fmt: skip
    tokenizer, ids = make_tokenizer(extra)
    return MORE_KINDS[kind](transformers, tokenizer, ids, {**TEXT, "vocab_size": len(ids)})

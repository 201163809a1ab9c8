"""Directories of tiny vision-language models with random weights, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from PIL import Image
from tokenizers import decoders, pre_tokenizers

__all__ = [
    "KINDS",
    "TEXT",
    "TOWER",
    "make_image",
    "make_tokenizer",
    "save_random",
    "write_vision_model",
]

# A CLIP tower with one token per patch; patches merged in fours with positions in three dimensions
# (M-RoPE); tiles of an image in a row with texts between them; a bidirectional mask over images.
KINDS = ("llava", "qwen2_5_vl", "idefics3", "gemma3")
MARKS = [
    "<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<image>", "<|vision_start|>",
    "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<start_of_image>", "<end_of_image>",
    "<image_soft_token>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
    "<img>", "</img>", "<IMG_CONTEXT>", "<video>", "<|image|>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
]  # fmt: skip
TEXT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
TOWER = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
_PLACES = {
    "llava": "<image>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "idefics3": "<image>",
    "gemma3": "<start_of_image>",
}


def _template(kind: str) -> str:
    """Return a chat template; LLaVA's reads content only as a list of parts."""
    part = (
        "{% if part['type'] == 'image' %}" + _PLACES[kind] + "{% elif part['type'] == 'text' %}"
        "{{ part['text'] }}{% endif %}"
    )
    parts = "{% for part in message['content'] %}" + part + "{% endfor %}"
    if kind != "llava":
        parts = (
            "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
            + parts
            + "{% endif %}"
        )
    return (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        + parts
        + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def _config(kind: str, ids: dict[str, int], size: int) -> Any:
    """Return the transformers config of a tiny model."""
    import transformers

    text = {**TEXT, "vocab_size": size}
    if kind == "llava":
        return transformers.LlavaConfig(
            text_config={**text, "model_type": "llama"},
            vision_config={**TOWER, "model_type": "clip_vision_model"},
            image_token_index=ids["<image>"],
            image_seq_length=4,
        )
    if kind == "qwen2_5_vl":
        return transformers.Qwen2_5_VLConfig(
            text_config={
                **text,
                "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2],
                                    "rope_theta": 1e4},
            },
            vision_config={
                "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4,
                "out_hidden_size": 32, "window_size": 56, "fullatt_block_indexes": [1],
            },
            image_token_id=ids["<|image_pad|>"],
            video_token_id=ids["<|video_pad|>"],
            vision_start_token_id=ids["<|vision_start|>"],
            vision_end_token_id=ids["<|vision_end|>"],
        )  # fmt: skip
    if kind == "idefics3":
        return transformers.Idefics3Config(
            text_config={**text, "model_type": "llama"},
            vision_config={**TOWER, "model_type": "idefics3_vision"},
            image_token_id=ids["<image>"],
            scale_factor=2,
        )
    return transformers.Gemma3Config(
        text_config={
            **text, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": False,
        },
        tie_word_embeddings=False,
        vision_config={**TOWER, "model_type": "siglip_vision_model"},
        mm_tokens_per_image=4,
        boi_token_index=ids["<start_of_image>"],
        eoi_token_index=ids["<end_of_image>"],
        image_token_index=ids["<image_soft_token>"],
    )  # fmt: skip


def _write_processor(kind: str, folder: Path, tokenizer: Any) -> None:
    import transformers

    square = {"height": 28, "width": 28}
    template = _template(kind)
    if kind == "llava":
        images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=square)
        transformers.LlavaProcessor(
            images,
            tokenizer,
            patch_size=14,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=template,
        ).save_pretrained(folder)
    elif kind == "gemma3":
        images = transformers.Gemma3ImageProcessorPil(size=square)
        transformers.Gemma3Processor(
            images, tokenizer, chat_template=template, image_seq_length=4
        ).save_pretrained(folder)
    elif kind == "idefics3":
        images = transformers.Idefics3ImageProcessorPil(
            size={"longest_edge": 56}, max_image_size={"longest_edge": 28}
        )
        transformers.Idefics3Processor(
            images, tokenizer, image_seq_len=1, chat_template=template
        ).save_pretrained(folder)
    else:  # the whole processor has a part for videos, which needs torchvision
        images = transformers.Qwen2VLImageProcessorPil(
            size={"shortest_edge": 28 * 28, "longest_edge": 56 * 84}
        )
        images.save_pretrained(folder)
        file = folder / "preprocessor_config.json"
        settings = {**json.loads(file.read_text()), "processor_class": "Qwen2_5_VLProcessor"}
        file.write_text(json.dumps(settings))
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)


def make_tokenizer(extra: dict[str, str]) -> tuple[Any, dict[str, int]]:
    """Return a tokenizer of bytes and `MARKS`, and the ids of its tokens.

    Args:
        extra: attribute of the tokenizer -> special token.
    """
    import transformers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: id for id, token in enumerate([*MARKS, *alphabet])}
    fast = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(MARKS)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        extra_special_tokens=extra, padding_side="left",
    )  # fmt: skip
    return tokenizer, vocabulary


def save_random(config: Any, folder: Path) -> None:
    """Write a model with large random weights, so that images change the text."""
    import transformers

    chosen = transformers.AutoModelForImageTextToText._model_mapping[type(config)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = chosen._from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0, 0.2)
            elif parameter.numel() == 1:  # gates of cross-attention
                parameter.data.fill_(0.5)
    model.save_pretrained(folder)


def write_vision_model(folder: Path, kind: str) -> Path:
    """Write a tiny model with random weights, its processor and its chat template."""
    extra = {}
    if kind == "gemma3":
        extra = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
                 "image_token": "<image_soft_token>"}  # fmt: skip
    tokenizer, ids = make_tokenizer(extra)
    folder.mkdir(parents=True, exist_ok=True)
    _write_processor(kind, folder, tokenizer)
    save_random(_config(kind, ids, len(ids)), folder)
    return folder


def make_image(width: int, height: int, seed: int) -> Any:
    """Return an image of random colors."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)

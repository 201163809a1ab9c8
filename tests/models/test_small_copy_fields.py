"""Small copies of architectures whose config has one list entry per layer, of any depth."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from bmforge.models.transformers.small_copy import LAYERS, build_small_copy, shrink_config

CONFIGS = {
    "Qwen3Config": ("sliding_attention", "full_attention"),
    "Qwen2Config": ("sliding_attention", "full_attention"),
    "Gemma2Config": ("sliding_attention", "full_attention"),
    "Gemma3TextConfig": ("sliding_attention", "full_attention"),
    "Cohere2Config": ("sliding_attention", "full_attention"),
    "GptOssConfig": ("sliding_attention", "full_attention"),
    "SmolLM3Config": ("full_attention", "full_attention"),
    "Lfm2Config": ("conv", "full_attention"),
}


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("kind", CONFIGS)
def test_lists_have_an_entry_per_layer(kind: str, layers: int) -> None:
    kinds = [CONFIGS[kind][number % 2] for number in range(layers)]
    config = getattr(transformers, kind)(num_hidden_layers=layers, layer_types=list(kinds))
    small: Any = shrink_config(config)
    assert small.num_hidden_layers == LAYERS == len(small.layer_types)
    assert set(small.layer_types) == set(kinds)
    if layers == 3:
        build_small_copy(config, "language_model")


@pytest.mark.parametrize("kind", ["gemma3n_text", "gemma4_text", "gemma4"])
def test_lists_of_sizes_and_overrides_fit_the_small_depth(kind: str) -> None:
    """Gemma 3n has one MLP width per layer, Gemma 4 another head width in some layers."""
    twin = build_small_copy(transformers.AutoConfig.for_model(kind), "language_model")
    text = twin.config.get_text_config(decoder=True)
    assert text.num_hidden_layers == LAYERS == len(text.layer_types)
    again = type(text).from_dict(text.to_dict())  # a saved config is read again
    assert again.num_hidden_layers == LAYERS


@pytest.mark.parametrize("kind", ["deepseek_v3", "axk1", "youtu", "longcat_flash"])
def test_width_of_rotary_heads(kind: str) -> None:
    """Latent attention applies rotary embeddings to a part of each head, of width `head_dim`."""
    small = shrink_config(transformers.AutoConfig.for_model(kind)).get_text_config(decoder=True)
    assert small.head_dim == small.qk_rope_head_dim == 8


@pytest.mark.parametrize(
    ("sections", "expected"),
    [([16, 24, 24], [2, 3, 3]), ([22, 22, 20], [3, 3, 2]), ([24, 20, 20], [4, 2, 2])],
)
def test_sections_of_multimodal_positions(sections: list[int], expected: list[int]) -> None:
    """They keep their proportions, and their sum is half the width of a head."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    config = transformers.Qwen2VLConfig(text_config={"rope_parameters": rope})
    assert shrink_config(config).text_config.rope_parameters["mrope_section"] == expected

"""Small copies of architectures whose config has one list entry per layer, of any depth."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from bmforge.models.transformers.small_copy import LAYERS, build_twin, shrink_config

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
        build_twin(config, "language_model")

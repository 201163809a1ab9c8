"""GPT-J against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bmforge.errors import ConfigError
from bmforge.models.gptj import GPTJ, GPTJConfig
from bmforge.testing.decoder_suite import DecoderSuite
from bmforge.testing.file_suite import FileSuite
from bmforge.testing.presets import check_preset_shapes, count_preset
from bmforge.testing.tolerance import assert_equal_trees

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "rotary_dim": 4,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


class TestGPTJ(DecoderSuite, FileSuite):
    """GPT-J."""

    model_class = GPTJ
    hf_class = transformers.GPTJForCausalLM
    hf_heads = {  # noqa: RUF012
        "sequence_classification": transformers.GPTJForSequenceClassification,
        "question_answering": transformers.GPTJForQuestionAnswering,
        "none": transformers.GPTJModel,
    }
    cases = {  # noqa: RUF012
        "default": TINY,
        "whole_head_turns": {**TINY, "rotary_dim": 8},
        "odd_n_inner": {**TINY, "n_inner": 37, "layer_norm_epsilon": 1e-3},
        "tied": {**TINY, "tie_word_embeddings": True},
        "relu": {**TINY, "activation_function": "relu"},
    }


def test_published_config_and_buffers(tmp_path: Path) -> None:
    """The fields of EleutherAI/gpt-j-6b's config.json, and the buffers of its checkpoint, open."""
    raw = {
        **TINY,
        "activation_function": "gelu_new",
        "architectures": ["GPTJForCausalLM"],
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "gradient_checkpointing": False,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gptj",
        "n_inner": None,
        "rotary": True,
        "scale_attn_weights": True,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "tie_word_embeddings": False,
        "tokenizer_class": "GPT2Tokenizer",
        "transformers_version": "4.18.0.dev0",
        "use_cache": True,
    }
    model = GPTJ.from_config(GPTJConfig.from_hf(raw))
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for layer in range(2):
        seen = torch.ones(1, 1, 32, 32, dtype=torch.uint8).tril()
        tensors[f"transformer.h.{layer}.attn.bias"] = seen
        tensors[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e9)
    save_file(tensors, file)
    again = GPTJ.from_pretrained(tmp_path)
    assert_equal_trees(again.state_dict(), model.state_dict())
    assert again.config == model.config


@pytest.mark.parametrize(
    "wrong", [{"rotary_dim": 0}, {"rotary_dim": 3}, {"rotary_dim": 10}, {"num_heads": 5}]
)
def test_contradictions(wrong: dict[str, int]) -> None:
    """Sizes that do not go together raise with their names."""
    sizes = {"hidden_size": 32, "num_heads": 4, "rotary_dim": 4}
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        GPTJConfig(**{**sizes, **wrong})  # type: ignore[arg-type]


def test_preset_size() -> None:
    """gptj-6b: the numel of the published shapes (50,400 x 4,096 embedding and head with bias)."""
    assert count_preset(GPTJ, "gptj-6b") == 6_050_882_784
    check_preset_shapes(GPTJ, transformers.GPTJForCausalLM, "gptj-6b")

"""Llama against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from bmforge.models import Llama, LlamaConfig
from bmforge.testing.decoder_suite import DecoderSuite
from bmforge.testing.file_suite import FileSuite

LLAMA_TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}


def scaled(kind: str, **numbers: Any) -> dict[str, Any]:
    """Tiny Llama with a rotary scaling; sequences of 24 tokens go beyond its 16 positions."""
    rope = {"rope_type": kind, "rope_theta": 100.0, **numbers}
    return {**LLAMA_TINY, "rope_parameters": rope}


class TestLlama(DecoderSuite, FileSuite):
    """Llama."""

    model_class = Llama
    hf_class = transformers.LlamaForCausalLM
    hf_heads = {  # noqa: RUF012
        "sequence_classification": transformers.LlamaForSequenceClassification,
        "token_classification": transformers.LlamaForTokenClassification,
        "question_answering": transformers.LlamaForQuestionAnswering,
        "none": transformers.LlamaModel,
    }
    cases = {  # noqa: RUF012
        "gqa": {**LLAMA_TINY, "num_key_value_heads": 2},
        "mha": LLAMA_TINY,
        "mqa": {**LLAMA_TINY, "num_key_value_heads": 1},
        "biases": {**LLAMA_TINY, "attention_bias": True, "mlp_bias": True},
        "tied": {**LLAMA_TINY, "tie_word_embeddings": True},
        "head_dim": {**LLAMA_TINY, "head_dim": 12, "rms_norm_eps": 1e-3},
        "gelu": {**LLAMA_TINY, "hidden_act": "gelu"},
        "linear": scaled("linear", factor=2.0),
        "dynamic": scaled("dynamic", factor=2.0),
        "yarn": scaled("yarn", factor=4.0, original_max_position_embeddings=16),
        "yarn_mscale": scaled(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            beta_fast=8.0,
            beta_slow=2.0,
            mscale=0.7,
            mscale_all_dim=1.3,
            truncate=False,
        ),
        "llama3": scaled(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
        "longrope": scaled(
            "longrope",
            factor=4.0,
            original_max_position_embeddings=16,
            short_factor=[1.0, 1.1, 1.2, 1.3],
            long_factor=[1.0, 2.0, 3.0, 4.0],
        ),
    }


def check_llama_preset(name: str) -> None:
    """Compare a preset's shapes with transformers', built from the config we write."""
    ours = Llama.from_config(LlamaConfig.preset(name), device="meta")
    fields = {k: v for k, v in ours.config.to_hf().items() if k != "model_type"}
    with torch.device("meta"):
        theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields))
    shapes = {r.source: tuple(ours.get_parameter(r.parameter).shape) for r in ours.active_rules()}
    assert shapes == {n: tuple(p.shape) for n, p in theirs.named_parameters()}


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama-7b", 6_738_415_616),
        ("llama-2-13b", 13_015_864_320),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
    ],
)
def test_llama_preset_sizes(name: str, count: int) -> None:
    """The published numbers of parameters."""
    model = Llama.from_config(LlamaConfig.preset(name), device="meta")
    assert sum(p.numel() for p in model.parameters()) == count


def test_llama_preset_shapes() -> None:
    """A preset's shapes are transformers'."""
    check_llama_preset("llama-3.2-1b")


@pytest.mark.long
@pytest.mark.parametrize("name", list(LlamaConfig.presets))
def test_every_llama_preset_shapes(name: str) -> None:
    """Every preset's shapes are transformers'."""
    check_llama_preset(name)

"""GPT-2 against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from bmforge.models import GPT2, GPT2Config
from bmforge.testing.decoder_suite import DecoderSuite
from bmforge.testing.file_suite import FileSuite

GPT2_TINY: dict[str, Any] = {
    "vocab_size": 96,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}


class TestGPT2(DecoderSuite, FileSuite):
    """GPT-2."""

    model_class = GPT2
    hf_class = transformers.GPT2LMHeadModel
    hf_heads = {  # noqa: RUF012
        "sequence_classification": transformers.GPT2ForSequenceClassification,
        "token_classification": transformers.GPT2ForTokenClassification,
        "question_answering": transformers.GPT2ForQuestionAnswering,
        "none": transformers.GPT2Model,
    }
    cases = {  # noqa: RUF012
        "default": GPT2_TINY,
        "odd_n_inner": {**GPT2_TINY, "n_inner": 37},
        "untied": {**GPT2_TINY, "tie_word_embeddings": False},
        "relu": {**GPT2_TINY, "activation_function": "relu"},
        "exact_gelu": {**GPT2_TINY, "activation_function": "gelu", "layer_norm_epsilon": 1e-3},
    }


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2-small", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_gpt2_preset_sizes(name: str, count: int) -> None:
    """The published numbers of parameters (Radford et al. 2019, as released)."""
    model = GPT2.from_config(GPT2Config.preset(name), device="meta")
    assert sum(p.numel() for p in model.parameters()) == count

"""GPT-2 against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from bmforge.errors import ConfigError
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


def test_published_fields_that_change_nothing() -> None:
    """Fields that old writers and other programs leave in config.json, beside some that count."""
    kept = ("num_return_sequences", "repetition_penalty", "length_penalty", "num_beam_groups")
    kept += ("typical_p", "no_repeat_ngram_size", "min_length", "early_stopping", "bad_words_ids")
    raw = {"model_type": "gpt2", "vocab_size": 50, "_num_labels": 1, "output_past": True}
    raw |= {"finetuning_task": "mnli", "model_max_length": 512, "_attn_implementation": "sdpa"}
    raw |= {"transformers.js_config": {"dtype": "q4"}, "unsloth_fixed": True}
    assert GPT2Config.from_hf({**raw, **dict.fromkeys(kept, 2)}).vocab_size == 50
    with pytest.raises(ConfigError, match="quantization_config"):
        GPT2Config.from_hf({**raw, "quantization_config": {"bits": 4}})


def test_dropout_of_the_embedding(tmp_path: Path) -> None:
    """Of its own where config.json says so, else the residual's; and back again."""
    raw = {"model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 1, "vocab_size": 20}
    cases = [({}, 0.1, 0.1), ({"embd_pdrop": 0.5}, 0.5, 0.1), ({"resid_pdrop": 0.0}, 0.1, 0.0)]
    for fields, embed, residual in cases:
        model = GPT2.from_config(GPT2Config.from_hf({**raw, **fields}))
        assert (model.spec.embed_dropout, model.layers["0"].dropout) == (embed, residual)
        model.save_pretrained(tmp_path, overwrite=True)
        theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
        assert theirs.transformer.drop.p == embed
        assert theirs.transformer.h[0].mlp.dropout.p == residual
        assert GPT2Config.from_pretrained(tmp_path) == model.config
    changed = model.config.replace(embed_dropout=None, dropout=0.3)
    assert GPT2.from_config(changed).spec.embed_dropout == 0.3

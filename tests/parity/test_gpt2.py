"""GPT-2 against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
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


def test_heads_of_another_width_and_no_biases(tmp_path: Path) -> None:
    """CPM-Pretrain's: zeros as biases, and as more rows of narrow heads, change nothing."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
    narrow = GPT2.from_config(GPT2Config(**sizes, head_dim=6, bias=False), seed=0).eval()
    wide = GPT2.from_config(GPT2Config(**sizes), seed=0).eval()
    tensors = wide.state_dict()
    for name, value in narrow.state_dict().items():
        if ".attn." in name:
            # Scores are divided by the root of a head's width: the queries make up for it.
            scale = (8 / 6) ** 0.5 if "q_proj" in name else 1.0
            heads = value if "o_proj" not in name else value.t()
            heads = torch.nn.functional.pad(heads.unflatten(0, (4, 6)), (0, 0, 0, 2)).flatten(0, 1)
            value = scale * (heads if "o_proj" not in name else heads.t())
        tensors[name] = value
    for name, value in tensors.items():
        if name.endswith(".bias") and "norm" not in name:
            value.zero_()
    wide.load_state_dict(tensors)
    ids = torch.arange(10)[None]
    with torch.no_grad():
        want = wide(ids).logits
        torch.testing.assert_close(narrow(ids).logits, want, rtol=1e-5, atol=1e-5)
        narrow.save_pretrained(tmp_path)
        again = GPT2.from_pretrained(tmp_path)
        assert (again.config.head_dim, again.config.bias) == (6, False)
        assert torch.equal(again(ids).logits, narrow(ids).logits)

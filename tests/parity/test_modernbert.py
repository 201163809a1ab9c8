"""ModernBERT against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from bmforge.errors import ConfigError
from bmforge.models import AutoModel, ModernBert, ModernBertConfig
from bmforge.nn import build_mask
from bmforge.testing.derived_suite import mark_long_except
from bmforge.testing.encoder_suite import EncoderSuite
from bmforge.testing.file_suite import FileSuite
from bmforge.testing.presets import check_preset_shapes, count_preset

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "local_attention": 6,
    "pad_token_id": 95,
    **dict.fromkeys(("cls_token_id", "bos_token_id", "eos_token_id", "sep_token_id"), 1),
}
BIASES = ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias")


@mark_long_except(
    "test_outputs_and_hidden_states",
    "test_loss_and_gradients",
    "test_conversion_is_exact",
    "test_padding_changes_nothing",
    "test_packed_documents",
    "test_every_head",
    "test_standard_deviation_of_init",
)
class TestModernBert(EncoderSuite, FileSuite):
    """ModernBERT."""

    model_class = ModernBert
    hf_class = transformers.ModernBertForMaskedLM
    hf_heads = {  # noqa: RUF012
        "sequence_classification": transformers.ModernBertForSequenceClassification,
        "token_classification": transformers.ModernBertForTokenClassification,
        "question_answering": transformers.ModernBertForQuestionAnswering,
        "none": transformers.ModernBertModel,
    }
    cases = {  # noqa: RUF012
        "default": {**TINY, "classifier_pooling": "mean"},
        "biases": {
            **TINY,
            **dict.fromkeys(BIASES, True),
            "layer_types": ["sliding_attention", *["full_attention"] * 2, "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                "full_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
            "tie_word_embeddings": False,
        },
    }


def test_preset_sizes() -> None:
    """The published number of parameters of the base model, with its head."""
    assert count_preset(ModernBert, "modernbert-base") == 149_655_232


@pytest.mark.long
@pytest.mark.parametrize("name", ModernBertConfig.presets)
def test_every_preset_shapes(name: str) -> None:
    """Every preset's shapes are transformers'."""
    check_preset_shapes(ModernBert, transformers.ModernBertForMaskedLM, name)


def test_former_fields() -> None:
    """The fields of config.json before transformers 5 are read."""
    raw = {**TINY, "model_type": "modernbert", "global_attn_every_n_layers": 2}
    raw |= {"global_rope_theta": 300.0, "local_rope_theta": 50.0}
    config = ModernBertConfig.from_hf(raw)
    assert (config.rope_theta, config.local_rope_theta) == (300.0, 50.0)
    assert config.kinds == ["full_attention", "sliding_attention"] * 2
    assert ModernBertConfig.from_hf(config.to_hf()) == config
    scaled = {"full_attention": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}
    assert AutoModel.family_of({**raw, "rope_parameters": scaled}) is not ModernBert


def test_mask_of_a_window_on_both_sides() -> None:
    """Without causality a window has as many tokens on each side."""
    mask = build_mask((1, 7), torch.device("cpu"), causal=False, window=3)
    distances = torch.arange(7)[:, None] - torch.arange(7)
    assert mask is not None
    assert torch.equal(mask[0, 0], distances.abs() < 3)
    assert build_mask((1, 3), torch.device("cpu"), causal=False, window=3) is None
    shown = torch.tensor([[1, 1, 1, 1, 1, 0, 0]])
    padded = build_mask((1, 7), torch.device("cpu"), causal=False, window=3, attention_mask=shown)
    assert padded is not None
    assert torch.equal(padded[0, 0, :5], (distances.abs() < 3)[:5] & shown.bool())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["full_attention"]}, "num_layers=22"),
        ({"local_attention": 1}, "local_attention=1"),
        ({"classifier_pooling": "max"}, "classifier_pooling='max'"),
    ],
)
def test_wrong_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    """Inconsistent fields are named."""
    with pytest.raises(ConfigError, match=message):
        ModernBertConfig(**fields)

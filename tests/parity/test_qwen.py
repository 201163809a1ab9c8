"""Qwen2, Qwen2.5 and Qwen3 against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from bmforge.errors import ConfigError
from bmforge.models.qwen import Qwen, QwenConfig
from bmforge.testing.decoder_suite import DecoderSuite
from bmforge.testing.file_suite import FileSuite
from bmforge.testing.presets import check_preset_shapes, count_preset

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}
TINY3 = {**TINY, "head_dim": 12}
WINDOW = {"use_sliding_window": True, "sliding_window": 5}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
CASES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "tied": {"tie_word_embeddings": True},
    "window": {**WINDOW, "max_window_layers": 1},
    "layer_types": {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "yarn": {"rope_parameters": YARN},
    "padding": {"pad_token_id": 3, "rms_norm_eps": 1e-3},
}


class TestQwen2(DecoderSuite, FileSuite):
    """Qwen2 and Qwen2.5."""

    model_class = Qwen
    hf_class = transformers.Qwen2ForCausalLM
    hf_heads = {  # noqa: RUF012
        "sequence_classification": transformers.Qwen2ForSequenceClassification,
        "token_classification": transformers.Qwen2ForTokenClassification,
        "question_answering": transformers.Qwen2ForQuestionAnswering,
        "none": transformers.Qwen2Model,
    }
    cases = {name: {**TINY, **fields} for name, fields in CASES.items()}  # noqa: RUF012


class TestQwen3(DecoderSuite, FileSuite):
    """Qwen3, dense."""

    model_class = Qwen
    hf_class = transformers.Qwen3ForCausalLM
    hf_heads = {  # noqa: RUF012
        "sequence_classification": transformers.Qwen3ForSequenceClassification,
        "token_classification": transformers.Qwen3ForTokenClassification,
        "question_answering": transformers.Qwen3ForQuestionAnswering,
        "none": transformers.Qwen3Model,
    }
    cases = {  # noqa: RUF012
        **{name: {**TINY3, **fields} for name, fields in CASES.items()},
        "biases": {**TINY3, "attention_bias": True},
    }


def test_a_new_config_names_its_version() -> None:
    """What we write opens as the right class of transformers, from a preset too."""
    for name, kind in (("qwen2.5-0.5b", "Qwen2"), ("qwen3-0.6b", "Qwen3")):
        raw = QwenConfig.preset(name).to_hf()
        assert raw["model_type"] == kind.lower()
        assert raw["architectures"] == [f"{kind}ForCausalLM"]
        assert QwenConfig.from_hf(raw) == QwenConfig.preset(name)


def test_published_config() -> None:
    """Qwen/Qwen2.5-7B's config.json, whose window is switched off, is the preset."""
    raw = {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 3584,
        "initializer_range": 0.02,
        "intermediate_size": 18944,
        "max_position_embeddings": 131072,
        "max_window_layers": 28,
        "model_type": "qwen2",
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1",
        "use_cache": True,
        "use_mrope": False,
        "use_sliding_window": False,
        "vocab_size": 152064,
    }
    config = QwenConfig.from_hf(raw)
    assert config == QwenConfig.preset("qwen2.5-7b")
    assert raw.items() <= {**config.to_hf(), "torch_dtype": "bfloat16"}.items()


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"]}, "use_sliding_window"),
        ({"layer_types": ["chunked_attention", "full_attention"], **WINDOW}, "chunked"),
        ({"layer_types": ["sliding_attention"] * 3, **WINDOW}, "window_layers"),
        ({"attention_bias": True}, "attn_bias"),
        ({"model_type": "qwen4"}, "qwen4"),
    ],
)
def test_contradictions(wrong: dict[str, Any], word: str) -> None:
    """What transformers would not compute either, or would ignore, raises."""
    with pytest.raises(ConfigError, match=word):
        QwenConfig.from_hf({**TINY, "model_type": "qwen2", **wrong})


COUNTS = {
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
}


@pytest.mark.parametrize("name", list(QwenConfig.presets))
def test_preset_sizes(name: str) -> None:
    """The hub's counts of the published checkpoints (Qwen/Qwen*), tied heads counted once."""
    assert count_preset(Qwen, name) == COUNTS[name]


@pytest.mark.long
@pytest.mark.parametrize("name", list(QwenConfig.presets))
def test_every_preset_shapes(name: str) -> None:
    """Every preset's shapes are transformers'."""
    kind = transformers.Qwen3ForCausalLM if "qwen3" in name else transformers.Qwen2ForCausalLM
    check_preset_shapes(Qwen, kind, name)

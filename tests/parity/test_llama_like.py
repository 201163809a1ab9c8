"""Decoders with Llama's block and other fields, names or factors, against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from bmforge.errors import ConfigError
from bmforge.models import (
    AutoModel,
    Cohere,
    CohereConfig,
    Granite,
    InternLM3,
    InternLM3Config,
    Mistral,
    MistralConfig,
    Phi,
    Phi3,
    Phi3Config,
    SeedOss,
    StableLM,
    StableLMConfig,
    Starcoder2,
)
from bmforge.testing.derived_suite import DerivedDecoderSuite
from bmforge.testing.presets import check_preset_shapes, count_preset

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "pad_token_id": None,
}


PARTIAL = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.75}


class TestMistral(DerivedDecoderSuite):
    """Mistral."""

    model_class = Mistral
    hf_class = transformers.MistralForCausalLM
    hf_heads = {  # noqa: RUF012
        "sequence_classification": transformers.MistralForSequenceClassification,
        "token_classification": transformers.MistralForTokenClassification,
        "question_answering": transformers.MistralForQuestionAnswering,
        "none": transformers.MistralModel,
    }
    cases = {  # noqa: RUF012
        "window": {**TINY, "sliding_window": 5},
        "full": {**TINY, "sliding_window": None, "head_dim": 12, "tie_word_embeddings": True},
    }


class TestMinistral(DerivedDecoderSuite):
    """Ministral."""

    model_class = Mistral
    hf_class = transformers.MinistralForCausalLM
    hf_heads = {"none": transformers.MinistralModel}  # noqa: RUF012
    cases = {  # noqa: RUF012
        "mixed": {
            **TINY,
            "head_dim": 12,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    }


class TestGranite(DerivedDecoderSuite):
    """Granite 3."""

    model_class = Granite
    hf_class = transformers.GraniteForCausalLM
    hf_heads = {"none": transformers.GraniteModel}  # noqa: RUF012
    cases = {  # noqa: RUF012
        "factors": {
            **TINY,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
            "tie_word_embeddings": True,
        },
        "biases": {**TINY, "attention_bias": True, "mlp_bias": True},
    }


class TestPhi3(DerivedDecoderSuite):
    """Phi-3."""

    model_class = Phi3
    hf_class = transformers.Phi3ForCausalLM
    hf_heads = {  # noqa: RUF012
        "sequence_classification": transformers.Phi3ForSequenceClassification,
        "token_classification": transformers.Phi3ForTokenClassification,
        "none": transformers.Phi3Model,
    }
    cases = {  # noqa: RUF012
        "window": {**TINY, "sliding_window": 5},
        "longrope": {
            **TINY,
            "max_position_embeddings": 64,
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.1],
                "long_factor": [1.0, 2.0],
            },
        },
    }


class TestCohere(DerivedDecoderSuite):
    """Command R."""

    model_class = Cohere
    hf_class = transformers.CohereForCausalLM
    hf_heads = {"none": transformers.CohereModel}  # noqa: RUF012
    cases = {  # noqa: RUF012
        "tied": {**TINY, "logit_scale": 0.25},
        "biases": {**TINY, "attention_bias": True, "tie_word_embeddings": False},
    }


class InternLM3ForCausalLM(transformers.LlamaForCausalLM):
    """transformers' class for InternLM3, with its config."""

    config_class = transformers.AutoConfig.for_model("internlm3").__class__


class TestInternLM3(DerivedDecoderSuite):
    """InternLM3."""

    model_class = InternLM3
    hf_class = InternLM3ForCausalLM
    cases = {  # noqa: RUF012
        "plain": {**TINY, "head_dim": 12},
        "biases": {**TINY, "head_dim": 8, "attention_bias": True, "mlp_bias": True},
    }


class TestStarcoder2(DerivedDecoderSuite):
    """StarCoder2."""

    model_class = Starcoder2
    hf_class = transformers.Starcoder2ForCausalLM
    hf_heads = {  # noqa: RUF012
        "sequence_classification": transformers.Starcoder2ForSequenceClassification,
        "token_classification": transformers.Starcoder2ForTokenClassification,
        "none": transformers.Starcoder2Model,
    }
    cases = {  # noqa: RUF012
        "window": {**TINY, "sliding_window": 5},
        "plain": {**TINY, "use_bias": False, "tie_word_embeddings": False},
    }


class TestStableLM(DerivedDecoderSuite):
    """StableLM."""

    model_class = StableLM
    hf_class = transformers.StableLmForCausalLM
    hf_heads = {  # noqa: RUF012
        "sequence_classification": transformers.StableLmForSequenceClassification,
        "token_classification": transformers.StableLmForTokenClassification,
        "none": transformers.StableLmModel,
    }
    cases = {  # noqa: RUF012
        "biases": {**TINY, "use_qkv_bias": True},
        "partial": {**TINY, "rope_parameters": PARTIAL},
    }


class TestPhi(DerivedDecoderSuite):
    """Phi-1 and Phi-2."""

    model_class = Phi
    hf_class = transformers.PhiForCausalLM
    hf_heads = {  # noqa: RUF012
        "sequence_classification": transformers.PhiForSequenceClassification,
        "token_classification": transformers.PhiForTokenClassification,
        "none": transformers.PhiModel,
    }
    cases = {  # noqa: RUF012
        "default": TINY,
        "partial": {**TINY, "hidden_act": "gelu", "rope_parameters": {**PARTIAL}},
    }


class TestSeedOss(DerivedDecoderSuite):
    """Seed-OSS."""

    model_class = SeedOss
    hf_class = transformers.SeedOssForCausalLM
    hf_heads = {  # noqa: RUF012
        "sequence_classification": transformers.SeedOssForSequenceClassification,
        "token_classification": transformers.SeedOssForTokenClassification,
        "question_answering": transformers.SeedOssForQuestionAnswering,
        "none": transformers.SeedOssModel,
    }
    cases = {  # noqa: RUF012
        "default": {**TINY, "head_dim": 12, "attention_dropout": 0.0, "residual_dropout": 0.0},
        "biases": {
            **TINY,
            "head_dim": 8,
            "attention_dropout": 0.0,
            "residual_dropout": 0.0,
            "attention_out_bias": True,
            "mlp_bias": True,
        },
    }


COUNTS = {
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "granite-3-2b": 2_533_531_648,
    "granite-3-8b": 8_170_848_256,
    "phi-3-mini-4k": 3_821_079_552,
    "phi-3-medium-4k": 13_960_238_080,
    "phi-4": 14_659_507_200,
    "command-r-35b": 34_980_831_232,
    "aya-23-8b": 8_028_033_024,
    "internlm3-8b": 8_804_241_408,
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
    "starcoder2-15b": 15_957_889_024,
    "stablelm-3b": 2_795_443_200,
    "stablelm-2-1.6b": 1_644_515_328,
    "phi-1": 1_418_270_720,
    "phi-1.5": 1_418_270_720,
    "phi-2": 2_779_683_840,
    "seed-oss-36b": 36_151_104_512,
}
CLASSES: dict[Any, Any] = {
    Mistral: transformers.MistralForCausalLM,
    Granite: transformers.GraniteForCausalLM,
    Phi3: transformers.Phi3ForCausalLM,
    Cohere: transformers.CohereForCausalLM,
    InternLM3: InternLM3ForCausalLM,
    Starcoder2: transformers.Starcoder2ForCausalLM,
    StableLM: transformers.StableLmForCausalLM,
    Phi: transformers.PhiForCausalLM,
    SeedOss: transformers.SeedOssForCausalLM,
}
PRESETS = [(family, name) for family in CLASSES for name in family.config_class.presets]


@pytest.mark.parametrize(("family", "name"), PRESETS)
def test_preset_sizes(family: Any, name: str) -> None:
    """The hub's counts of the published checkpoints, tied heads counted once."""
    assert count_preset(family, name) == COUNTS[name]


@pytest.mark.long
@pytest.mark.parametrize(("family", "name"), PRESETS)
def test_every_preset_shapes(family: Any, name: str) -> None:
    """Every preset's shapes are transformers'."""
    check_preset_shapes(family, CLASSES[family], name)


def test_layer_types_of_a_mistral() -> None:
    """A Mistral with `layer_types` is a Ministral, as in transformers."""
    kinds = ["sliding_attention", "full_attention"]
    raw = {**TINY, "model_type": "mistral", "sliding_window": 5, "layer_types": kinds}
    config = MistralConfig.from_hf(raw)
    assert (config.model_type, config.window, config.window_layers) == ("ministral", 5, [0])
    assert MistralConfig.from_hf(config.to_hf()) == config
    with pytest.raises(ConfigError, match="sliding_window"):
        MistralConfig.from_hf({**raw, "sliding_window": None})


@pytest.mark.parametrize("field", ["qk_layernorm", "use_parallel_residual", "hidden_dropout"])
def test_other_stablelm_blocks_are_left_to_transformers(field: str) -> None:
    """StableLM 2 12B has another block; the native family refuses it by the field's name."""
    raw = {**TINY, "model_type": "stablelm", field: True}
    assert AutoModel.family_of(raw).__name__ == "TransformersModel"
    with pytest.raises(ConfigError, match=field):
        StableLMConfig.from_hf(raw)


def test_norms_of_queries_are_left_to_transformers() -> None:
    """Command R+ has norms that the native block lacks, so transformers runs it."""
    raw = {**TINY, "model_type": "cohere", "use_qk_norm": True}
    assert not CohereConfig.opens(raw)
    assert AutoModel.family_of(raw).__name__ == "TransformersModel"
    with pytest.raises(ConfigError, match="use_qk_norm"):
        CohereConfig.from_hf(raw)


def test_former_names_of_fields() -> None:
    """InternLM3's remote code and the first Phi-3 have other names of the same fields."""
    raw = {**TINY, "model_type": "internlm3", "qkv_bias": True, "bias": True, "head_dim": 8}
    config = InternLM3Config.from_hf(raw)
    assert config.attn_bias
    assert config.mlp_bias
    scaling = {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    phi = Phi3Config.from_hf({**TINY, "model_type": "phi3", "rope_scaling": scaling})
    assert phi.rope_scaling["kind"] == "longrope"

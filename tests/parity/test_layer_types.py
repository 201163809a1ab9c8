"""Decoders with norms behind sublayers, layers of several kinds or soft caps, as transformers."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch
import transformers

from bmforge.compress.prune.apply_plan import apply_plan_
from bmforge.compress.prune.plan import KeptIndices, PruningPlan
from bmforge.errors import ConfigError
from bmforge.models import (
    GLM4,
    AutoModel,
    Cohere2,
    Gemma,
    Gemma2,
    Gemma3,
    Gemma3Config,
    OLMo2,
    OLMo2Config,
    OLMo3,
    OLMo3Config,
    SmolLM3,
    SmolLM3Config,
)
from bmforge.models.changes import Change
from bmforge.testing import assert_close
from bmforge.testing.derived_suite import DerivedDecoderSuite
from bmforge.testing.native_suite import decode_both_ways
from bmforge.testing.presets import check_preset_shapes, count_preset

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "pad_token_id": None,
}
# Generation stops at no token.
ENDLESS: dict[str, Any] = {**TINY, "eos_token_id": None, "bos_token_id": None}
WIDE = {**ENDLESS, "head_dim": 12}
MIXED = ["full_attention", "sliding_attention", "full_attention"]


class LayerTypesSuite(DerivedDecoderSuite):
    """All tests of a decoder some of whose blocks the native step does not support."""

    not_applicable: ClassVar[dict[str, str]] = {"native step": "some blocks run in PyTorch"}

    def check_native_step(self, model: Any, off: float) -> None:
        """Compare the logits of a step, native where it can be, with torch's."""
        native, plain, _ = decode_both_ways(model)
        assert_close(native, plain, rtol=0, atol=off * float(plain.abs().max()))


class TestGemma(LayerTypesSuite):
    """Gemma 1."""

    model_class = Gemma
    hf_class = transformers.GemmaForCausalLM
    hf_heads = {  # noqa: RUF012
        "sequence_classification": transformers.GemmaForSequenceClassification,
        "token_classification": transformers.GemmaForTokenClassification,
        "none": transformers.GemmaModel,
    }
    cases = {  # noqa: RUF012
        "tied": WIDE,
        "biases": {**WIDE, "attention_bias": True, "tie_word_embeddings": False},
    }


class TestGemma2(LayerTypesSuite):
    """Gemma 2."""

    model_class = Gemma2
    hf_class = transformers.Gemma2ForCausalLM
    hf_heads = {  # noqa: RUF012
        "sequence_classification": transformers.Gemma2ForSequenceClassification,
        "token_classification": transformers.Gemma2ForTokenClassification,
        "none": transformers.Gemma2Model,
    }
    cases = {  # noqa: RUF012
        "capped": {
            **WIDE,
            "sliding_window": 5,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 1.5,
        },
        "plain": {
            **WIDE,
            "attention_bias": True,
            "sliding_window": 5,
            "layer_types": MIXED,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    }


class TestGemma3(LayerTypesSuite):
    """Gemma 3, text."""

    model_class = Gemma3
    hf_class = transformers.Gemma3ForCausalLM
    hf_heads = {  # noqa: RUF012
        "sequence_classification": transformers.Gemma3TextForSequenceClassification,
        "none": transformers.Gemma3TextModel,
    }
    cases = {  # noqa: RUF012
        "mixed": {
            **WIDE,
            "sliding_window": 5,
            "layer_types": MIXED,
            "query_pre_attn_scalar": 20,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 300.0},
            },
        },
        "default": {**WIDE, "sliding_window": 5},
    }
    deep_options = {"layer_types": (*MIXED, "sliding_attention")}  # noqa: RUF012


class TestCohere2(LayerTypesSuite):
    """Command R7B."""

    model_class = Cohere2
    hf_class = transformers.Cohere2ForCausalLM
    hf_heads = {"none": transformers.Cohere2Model}  # noqa: RUF012
    cases = {  # noqa: RUF012
        "mixed": {**ENDLESS, "sliding_window": 5, "layer_types": MIXED, "logit_scale": 0.25},
        "biases": {
            **ENDLESS,
            "sliding_window": 5,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    }
    deep_options = {"layer_types": (*MIXED, "sliding_attention")}  # noqa: RUF012


class TestOLMo2(LayerTypesSuite):
    """OLMo 2."""

    model_class = OLMo2
    hf_class = transformers.Olmo2ForCausalLM
    hf_heads = {  # noqa: RUF012
        "sequence_classification": transformers.Olmo2ForSequenceClassification,
        "none": transformers.Olmo2Model,
    }
    cases = {  # noqa: RUF012
        "default": ENDLESS,
        "biases": {**ENDLESS, "attention_bias": True, "tie_word_embeddings": True},
    }


class TestOLMo3(LayerTypesSuite):
    """OLMo 3."""

    model_class = OLMo3
    hf_class = transformers.Olmo3ForCausalLM
    hf_heads = {  # noqa: RUF012
        "sequence_classification": transformers.Olmo3ForSequenceClassification,
        "none": transformers.Olmo3Model,
    }
    cases = {  # noqa: RUF012
        "mixed": {
            **ENDLESS,
            "sliding_window": 5,
            "layer_types": MIXED,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                "full_attention": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "rope_theta": 300.0,
                    "original_max_position_embeddings": 4,
                },
            },
        },
        "default": {**ENDLESS, "sliding_window": 5},
    }
    deep_options = {"layer_types": (*MIXED, "sliding_attention")}  # noqa: RUF012


class TestSmolLM3(LayerTypesSuite):
    """SmolLM3."""

    model_class = SmolLM3
    hf_class = transformers.SmolLM3ForCausalLM
    hf_heads = {  # noqa: RUF012
        "sequence_classification": transformers.SmolLM3ForSequenceClassification,
        "token_classification": transformers.SmolLM3ForTokenClassification,
        "question_answering": transformers.SmolLM3ForQuestionAnswering,
        "none": transformers.SmolLM3Model,
    }
    cases = {  # noqa: RUF012
        "default": {**ENDLESS, "no_rope_layer_interval": 2},
        "biases": {
            **ENDLESS,
            "no_rope_layers": [0, 1, 1],
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    }


class TestGLM4(LayerTypesSuite):
    """GLM-4 0414."""

    model_class = GLM4
    hf_class = transformers.Glm4ForCausalLM
    hf_heads = {  # noqa: RUF012
        "sequence_classification": transformers.Glm4ForSequenceClassification,
        "token_classification": transformers.Glm4ForTokenClassification,
        "none": transformers.Glm4Model,
    }
    cases = {  # noqa: RUF012
        "default": {**ENDLESS, "head_dim": 12, "eos_token_id": 95},
        "no biases": {**ENDLESS, "head_dim": 8, "eos_token_id": 95, "attention_bias": False},
    }


class TestOlderGLM4(LayerTypesSuite):
    """GLM-4 before 0414."""

    model_class = GLM4
    hf_class = transformers.GlmForCausalLM
    hf_heads = {"none": transformers.GlmModel}  # noqa: RUF012
    cases = {"default": {**ENDLESS, "head_dim": 12, "eos_token_id": 95}}  # noqa: RUF012


COUNTS = {
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "command-r7b": 8_028_033_024,
    "command-a-111b": 111_057_580_032,
    "olmo-2-1b": 1_484_916_736,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "olmo-2-32b": 32_234_279_936,
    "olmo-3-7b": 7_298_011_136,
    "smollm3-3b": 3_075_098_624,
    "glm-4-9b": 9_399_951_360,
    "glm-4-9b-0414": 9_400_279_040,
    "glm-4-32b-0414": 32_566_081_536,
}
CLASSES: dict[Any, Any] = {
    Gemma: transformers.GemmaForCausalLM,
    Gemma2: transformers.Gemma2ForCausalLM,
    Gemma3: transformers.Gemma3ForCausalLM,
    Cohere2: transformers.Cohere2ForCausalLM,
    OLMo2: transformers.Olmo2ForCausalLM,
    OLMo3: transformers.Olmo3ForCausalLM,
    SmolLM3: transformers.SmolLM3ForCausalLM,
    GLM4: transformers.Glm4ForCausalLM,
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
    hf_class = CLASSES[family] if name != "glm-4-9b" else transformers.GlmForCausalLM
    check_preset_shapes(family, hf_class, name)


def test_fewer_heads_keep_their_norms() -> None:
    """Resized and pruned layers keep those entries of norms over all heads that their heads had."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_layers": 1}
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "max_seq_len": 32}
    model: Any = OLMo2.from_config(OLMo2Config(**sizes, **heads))
    norms = model.layers["0"].attn.q_norm.weight, model.layers["0"].attn.k_norm.weight
    for norm in norms:
        torch.nn.init.normal_(norm)
    pruned, resized = copy.deepcopy(model), copy.deepcopy(model)
    resized.change_(Change("resize", ("layers.0",), {"num_heads": 2}))
    apply_plan_(pruned, PruningPlan({"layers.0": KeptIndices(heads=(1, 2))}))
    query, key = (norm.detach().view(-1, 8) for norm in norms)
    # Each key-value head keeps its first query head, or the one of the plan.
    for small, rows in ((resized, [0, 2]), (pruned, [1, 2])):
        attn = small.layers["0"].attn
        assert torch.equal(attn.q_norm.weight, query[rows].flatten())
        assert torch.equal(attn.k_norm.weight, key.flatten())
        assert small(torch.arange(8)[None]).logits.isfinite().all()


@pytest.mark.parametrize(
    ("config_class", "fields", "message"),
    [
        (Gemma3Config, {"layer_types": ["full_attention"]}, "num_layers=26"),
        (Gemma3Config, {"window": 0}, "window=0"),
        (SmolLM3Config, {"rotated_layers": [1, 2]}, "rotated_layers"),
        (SmolLM3Config, {"unrotated_every": 0}, "unrotated_every=0"),
    ],
)
def test_wrong_layers_are_refused(config_class: Any, fields: Any, message: str) -> None:
    """Fields of layers that do not fit the number of layers are named."""
    with pytest.raises(ConfigError, match=message):
        config_class(**fields)


@pytest.mark.parametrize(
    ("family", "hf_config"),
    [
        (Gemma2, transformers.Gemma2Config),
        (Gemma3, transformers.Gemma3TextConfig),
        (OLMo3, transformers.Olmo3Config),
        (Cohere2, transformers.Cohere2Config),
        (SmolLM3, transformers.SmolLM3Config),
    ],
)
def test_usual_layers(family: Any, hf_config: Any) -> None:
    """The kinds of layers that config.json leaves out are those of transformers."""
    config = family.config_class(num_layers=14)
    expected, written = hf_config(num_hidden_layers=14).to_dict(), config.to_hf()
    names = {"layer_types", "no_rope_layers"} & set(expected)
    assert names
    assert {name: written[name] for name in names} == {name: expected[name] for name in names}
    raw = {name: value for name, value in written.items() if name not in names}
    assert family.config_class.from_hf(raw) == config


def test_former_and_nested_rotary_fields() -> None:
    """Both formats of two rotary tables are read; scaling of the local table is refused."""
    flat = {**TINY, "model_type": "gemma3_text", "rope_theta": 3e5, "rope_local_base_freq": 50.0}
    flat["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    config = Gemma3Config.from_hf(flat)
    assert (config.rope_theta, config.local_rope_theta) == (3e5, 50.0)
    assert config.rope_scaling == {"kind": "linear", "factor": 8.0}
    assert Gemma3Config.from_hf(config.to_hf()) == config
    tables = {"sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50.0}}
    with pytest.raises(ConfigError, match="sliding_attention"):
        OLMo3Config.from_hf({**TINY, "model_type": "olmo3", "rope_parameters": tables})


def test_glm_10b_and_glm4_share_a_model_type() -> None:
    """The older GLM-4 has the model_type of GLM-10B; other fields tell them apart."""
    raw = transformers.GlmConfig(**TINY).to_dict()
    assert AutoModel.family_of(raw) is GLM4

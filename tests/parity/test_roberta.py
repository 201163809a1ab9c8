"""RoBERTa against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bmforge.errors import ConfigError, ShapeError
from bmforge.models.roberta import Roberta, RobertaConfig
from bmforge.models.xlm_roberta import XLMRoberta
from bmforge.testing.batches import make_batch
from bmforge.testing.derived_suite import mark_long_except
from bmforge.testing.encoder_suite import EncoderSuite
from bmforge.testing.file_suite import FileSuite
from bmforge.testing.presets import count_preset
from bmforge.testing.reference_pair import make_twin
from bmforge.testing.tolerance import assert_close, assert_equal_trees

# The tests of heads put the padding's id at the vocabulary's end, and positions start after it.
ROBERTA_TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 160,
    "type_vocab_size": 1,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


class TestRoberta(EncoderSuite, FileSuite):
    """RoBERTa."""

    model_class = Roberta
    hf_class = transformers.RobertaForMaskedLM
    hf_heads = {  # noqa: RUF012
        "sequence_classification": transformers.RobertaForSequenceClassification,
        "token_classification": transformers.RobertaForTokenClassification,
        "question_answering": transformers.RobertaForQuestionAnswering,
        "none": transformers.RobertaModel,
    }
    cases = {  # noqa: RUF012
        "default": {**ROBERTA_TINY, "pad_token_id": 95},
        "padding_first": {**ROBERTA_TINY, "pad_token_id": 0, "type_vocab_size": 2},
        "relu": {**ROBERTA_TINY, "hidden_act": "relu", "layer_norm_eps": 1e-3, "pad_token_id": 95},
    }


@mark_long_except(
    "test_outputs_and_hidden_states", "test_loss_and_gradients", "test_conversion_is_exact"
)
class TestXLMRoberta(EncoderSuite, FileSuite):
    """XLM-RoBERTa."""

    model_class = XLMRoberta
    hf_class = transformers.XLMRobertaForMaskedLM
    hf_heads = {  # noqa: RUF012
        "sequence_classification": transformers.XLMRobertaForSequenceClassification,
        "token_classification": transformers.XLMRobertaForTokenClassification,
        "question_answering": transformers.XLMRobertaForQuestionAnswering,
        "none": transformers.XLMRobertaModel,
    }
    cases = {"default": {**ROBERTA_TINY, "pad_token_id": 95}}  # noqa: RUF012

    def reference_gradients(self, model: Any) -> dict[str, torch.Tensor]:
        """transformers names the tied weight by its head, which comes first in this class."""
        gradients = super().reference_gradients(model)
        embedding = "roberta.embeddings.word_embeddings.weight"
        tied = gradients.pop("lm_head.decoder.weight", None)
        return gradients if tied is None else {**gradients, embedding: tied}


@pytest.mark.parametrize(
    ("name", "count"), [("xlm-roberta-base", 278_295_186), ("xlm-roberta-large", 560_142_482)]
)
def test_xlm_roberta_preset_sizes(name: str, count: int) -> None:
    """The published numbers of parameters, with a tied head."""
    assert count_preset(XLMRoberta, name) == count


def test_positions_leave_padding_out(tmp_path: Path) -> None:
    """Positions are counted over real tokens, with padding on either side or within."""
    twin = make_twin(Roberta, transformers.RobertaForMaskedLM, ROBERTA_TINY, tmp_path)
    ids = make_batch(twin.model, batch=3).clamp(min=2)
    ids[0, :4], ids[1, 8:], ids[2, 5:7] = 1, 1, 1
    mask = (ids != 1).long()
    want = twin.reference(ids, attention_mask=mask).logits
    assert_close(twin.model(ids, attention_mask=mask).logits, want)
    positions = torch.arange(20, 32)[None]
    want = twin.reference(ids, position_ids=positions).logits
    assert_close(twin.model(ids, position_ids=positions).logits, want)


def test_other_bias_name(tmp_path: Path) -> None:
    """A checkpoint with the decoder's bias under its other name, or under both, opens."""
    twin = make_twin(Roberta, transformers.RobertaForMaskedLM, ROBERTA_TINY, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.decoder.bias"] = tensors["lm_head.bias"].clone()
    for _ in range(2):
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        again = Roberta.from_pretrained(tmp_path)
        assert_equal_trees(again.state_dict(), twin.model.state_dict())
        tensors.pop("lm_head.bias", None)


def test_untied(tmp_path: Path) -> None:
    """An untied decoder has its own weight and bias, as in transformers."""
    fields = {**ROBERTA_TINY, "tie_word_embeddings": False}
    twin = make_twin(Roberta, transformers.RobertaForMaskedLM, fields, tmp_path)
    ids = make_batch(twin.model)
    assert_close(twin.model(ids).logits, twin.reference(ids).logits)


def test_deep_classifier_dropout() -> None:
    """Dropout acts before both layers of the classifier, in training only."""
    raw = transformers.RobertaConfig(**ROBERTA_TINY, classifier_dropout=0.5).to_dict()
    model = Roberta.from_config(RobertaConfig.from_hf(raw).replace(head="sequence_classification"))
    ids = torch.arange(2, 26).view(2, 12)
    assert not torch.equal(model(ids).logits, model(ids).logits)
    assert torch.equal(model.eval()(ids).logits, model(ids).logits)


def test_longest_input() -> None:
    """The table has two rows more than there are positions, as in the published models."""
    fields = {**ROBERTA_TINY, "max_position_embeddings": 18}
    config = RobertaConfig.from_hf(transformers.RobertaConfig(**fields).to_dict())
    assert config.max_seq_len == 16
    assert config.to_hf()["max_position_embeddings"] == 18
    model = Roberta.from_config(config)
    assert model(torch.full((1, 16), 5)).logits.isfinite().all()
    with pytest.raises(ShapeError, match="max_seq_len=16"):
        model(torch.full((1, 17), 5))
    with pytest.raises(ConfigError, match="pad_token_id must be set"):
        RobertaConfig.from_hf({**fields, "pad_token_id": None})


# Of transformers' RobertaForMaskedLM, built on meta from the published config.json.
SIZES = {"roberta-base": 124_697_433, "roberta-large": 355_412_057}


@pytest.mark.parametrize("name", list(SIZES))
def test_preset_sizes(name: str) -> None:
    """The published numbers of parameters."""
    model = Roberta.from_config(RobertaConfig.preset(name), device="meta")
    assert sum(p.numel() for p in model.parameters()) == SIZES[name]


@pytest.mark.long
@pytest.mark.parametrize("name", list(RobertaConfig.presets))
def test_preset_shapes(name: str) -> None:
    """Every preset's shapes are transformers'."""
    ours = Roberta.from_config(RobertaConfig.preset(name), device="meta")
    fields = {k: v for k, v in ours.config.to_hf().items() if k != "model_type"}
    with torch.device("meta"):
        theirs = transformers.RobertaForMaskedLM(transformers.RobertaConfig(**fields))
    shapes = {r.source: tuple(ours.get_parameter(r.parameter).shape) for r in ours.active_rules()}
    assert shapes == {n: tuple(p.shape) for n, p in theirs.named_parameters()}

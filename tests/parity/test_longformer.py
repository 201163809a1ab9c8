"""Longformer against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bmforge.errors import ConfigError, ShapeError
from bmforge.models import Model
from bmforge.models.longformer import Longformer, LongformerConfig
from bmforge.testing.batches import Batch, make_batch
from bmforge.testing.encoder_suite import EncoderSuite
from bmforge.testing.file_suite import FileSuite
from bmforge.testing.reference_pair import make_twin
from bmforge.testing.tolerance import assert_close

SEPARATOR = 2
LONGFORMER_TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 300,
    "type_vocab_size": 1,
    "attention_window": [8, 24],
    "sep_token_id": SEPARATOR,
    "pad_token_id": 95,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


class TestLongformer(EncoderSuite, FileSuite):
    """Longformer, on rows of several blocks, of which the last is not full."""

    model_class = Longformer
    deep_options = {"windows": (8, 24, 8, 24)}  # noqa: RUF012
    hf_class = transformers.LongformerForMaskedLM
    hf_heads = {  # noqa: RUF012
        "sequence_classification": transformers.LongformerForSequenceClassification,
        "token_classification": transformers.LongformerForTokenClassification,
        "question_answering": transformers.LongformerForQuestionAnswering,
        "none": transformers.LongformerModel,
    }
    cases = {  # noqa: RUF012
        "blocks": LONGFORMER_TINY,
        "whole": {**LONGFORMER_TINY, "attention_window": 120},
        "segments": {**LONGFORMER_TINY, "type_vocab_size": 2, "hidden_act": "relu"},
    }

    def make_inputs(self, model: Model, batch: int = 2, seed: int = 1) -> Batch:
        """Return long rows with padding, three separators, and global tokens of varying number."""
        ids = make_batch(model, batch, length=150, seed=seed)
        ids[ids == SEPARATOR] = SEPARATOR + 1
        ids[:, [7, 8, 100]] = SEPARATOR
        mask = torch.ones_like(ids)
        mask[0, -30:] = 0
        inputs = {"input_ids": ids, "attention_mask": mask}
        if model.config.head == "masked_lm":
            inputs["global_attention_mask"] = torch.zeros_like(ids)
            inputs["global_attention_mask"][0, [0, 3, 70, 149]] = 1
            inputs["global_attention_mask"][1, 65] = 1
        return inputs


@pytest.mark.parametrize("length", [5, 64, 128, 129, 190])
@pytest.mark.parametrize("globals_", [0, 1, 9])
def test_lengths(length: int, globals_: int, tmp_path: Path) -> None:
    """Any length, with and without global tokens and padding, to either side."""
    twin = make_twin(Longformer, transformers.LongformerModel, LONGFORMER_TINY, tmp_path)
    ids = make_batch(twin.model, batch=3, length=length)
    chosen, mask = torch.zeros_like(ids), torch.ones_like(ids)
    for row in range(3 if globals_ else 0):
        chosen[row, torch.randperm(length)[: globals_ - row]] = 1
    mask[1, length // 2 :] = 0
    mask[2, : length // 4] = 0
    for extra in ({}, {"attention_mask": mask}):
        theirs = twin.reference(ids, global_attention_mask=chosen, **extra)
        ours = twin.model(ids, global_attention_mask=chosen, **extra)
        for name in ("last_hidden_state", "pooler_output"):
            want = getattr(theirs, name)
            assert_close(getattr(ours, name), want, atol=1e-6 * max(1, want.abs().max().item()))


def test_one_window_for_all(tmp_path: Path) -> None:
    """`attention_window` may be one number; it is written back as a list, which means the same."""
    raw = {**LONGFORMER_TINY, "attention_window": 20, "model_type": "longformer"}
    config = LongformerConfig.from_hf(raw)
    assert config.windows == (20, 20)
    assert LongformerConfig.from_hf(config.to_hf()) == config
    for windows in ([20, 21], [20, 20, 20], 0):
        with pytest.raises(ConfigError, match="windows"):
            LongformerConfig.from_hf({**raw, "attention_window": windows or [0, 0]})
    for field, value in (("attention_mode", "n2"), ("ignore_attention_mask", True)):
        with pytest.raises(ConfigError, match=field):
            LongformerConfig.from_hf({**raw, field: value})


def test_questions_need_separators() -> None:
    """Question answering without three separators says what is missing."""
    config = LongformerConfig.from_hf(LONGFORMER_TINY).replace(head="question_answering")
    model = Longformer.from_config(config)
    ids = torch.full((2, 12), 5)
    with pytest.raises(ShapeError, match=r"three separator tokens.*\[0, 0\]"):
        model(ids)
    assert model(ids, global_attention_mask=torch.ones_like(ids)).start_logits.isfinite().all()
    with pytest.raises(ShapeError, match="max_global_tokens=3"):
        model(ids, global_attention_mask=torch.ones_like(ids), max_global_tokens=3)
    with pytest.raises(ShapeError, match="global_attention_mask has the shape"):
        model(ids, global_attention_mask=torch.ones(2, 13))


def test_compiled_with_a_limit() -> None:
    """A compiled model that knows how many global tokens there can be has the same numbers."""
    torch.compiler.reset()
    model = Longformer.from_config(LongformerConfig.from_hf(LONGFORMER_TINY)).eval()
    ids = make_batch(model, length=150)
    chosen = torch.zeros_like(ids)
    chosen[0, [1, 80]], chosen[1, 149] = 1, 1
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    got = compiled(ids, global_attention_mask=chosen, max_global_tokens=3).logits
    assert_close(got, model(ids, global_attention_mask=chosen).logits)
    torch.compiler.reset()


def test_embeddings() -> None:
    """`encode` takes global tokens as well."""
    model = Longformer.from_config(LongformerConfig.from_hf(LONGFORMER_TINY)).eval()
    ids = make_batch(model, length=150)
    mask, chosen = torch.ones_like(ids), torch.zeros_like(ids)
    mask[0, 100:], chosen[:, 0] = 0, 1
    inputs = {"attention_mask": mask, "global_attention_mask": chosen}
    states = model(ids, **inputs).last_hidden_state
    assert_close(model.encode(ids, pooling="cls", **inputs), states[:, 0])
    mean = torch.stack([states[0, :100].mean(0), states[1].mean(0)])
    assert_close(model.encode(ids, **inputs), mean)


# Of transformers' LongformerForMaskedLM, built on meta from the published config.json; Lawformer's
# fields are those of its code, github.com/thunlp/LegalPLMs, convert_roberta_lfm.py.
SIZES = {
    "longformer-base-4096": 148_711_257,
    "longformer-large-4096": 434_653_273,
    "lawformer": 126_305_672,
}


@pytest.mark.parametrize("name", list(SIZES))
def test_preset_sizes(name: str) -> None:
    """The published numbers of parameters."""
    model = Longformer.from_config(LongformerConfig.preset(name), device="meta")
    assert sum(p.numel() for p in model.parameters()) == SIZES[name]


@pytest.mark.long
@pytest.mark.parametrize("name", list(LongformerConfig.presets))
def test_preset_shapes(name: str) -> None:
    """Every preset's shapes are transformers'."""
    ours = Longformer.from_config(LongformerConfig.preset(name), device="meta")
    fields = {k: v for k, v in ours.config.to_hf().items() if k != "model_type"}
    with torch.device("meta"):
        theirs = transformers.LongformerForMaskedLM(transformers.LongformerConfig(**fields))
    shapes = {r.source: tuple(ours.get_parameter(r.parameter).shape) for r in ours.active_rules()}
    assert shapes == {n: tuple(p.shape) for n, p in theirs.named_parameters()}

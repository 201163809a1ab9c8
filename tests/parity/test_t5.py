"""T5 and mT5 against transformers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from bmforge.errors import CheckpointError, ConfigError, ShapeError
from bmforge.models import Model
from bmforge.models.t5 import T5, T5Config
from bmforge.testing.batches import Batch
from bmforge.testing.file_suite import FileSuite
from bmforge.testing.presets import count_preset
from bmforge.testing.reference_pair import Twin, build_reference
from bmforge.testing.seq2seq_suite import Seq2SeqSuite
from bmforge.testing.tolerance import assert_close, assert_equal_trees

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 10,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.0,
    # Logits of a full-sized T5 are around 1 as well; with a tiny width the factor does it.
    "initializer_factor": 0.6,
}
# transformers' config of T5 takes this field as "do not scale the head" and ties it all the same.
UNSCALED = {
    **TINY,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "initializer_factor": 0.4,
}


class T5Suite(Seq2SeqSuite, FileSuite):
    """What T5 and mT5 share."""

    model_class = T5

    def make_inputs(self, model: Model, batch: int = 2, seed: int = 1) -> Batch:
        """Every source has one end token, which a sequence is classified by."""
        inputs = super().make_inputs(model, batch, seed)
        ids = inputs["input_ids"]
        inputs["input_ids"] = ids.masked_fill(ids == 1, 2)
        inputs["input_ids"][:, 7] = 1
        return inputs

    def check_gradients(self, twin: Twin) -> None:
        """The bare encoder has no loss; its gradients are those of token classification."""
        if twin.model.config.head != "encoder":
            super().check_gradients(twin)


class TestT5(T5Suite):
    """T5 1.0 and 1.1."""

    hf_class = transformers.T5ForConditionalGeneration
    hf_heads = {  # noqa: RUF012
        "sequence_classification": transformers.T5ForSequenceClassification,
        "token_classification": transformers.T5ForTokenClassification,
        "question_answering": transformers.T5ForQuestionAnswering,
        "none": transformers.T5Model,
        "encoder": transformers.T5EncoderModel,
    }
    cases = {  # noqa: RUF012
        "default": TINY,
        "unscaled_gated": UNSCALED,
        "silu": {**TINY, "feed_forward_proj": "gated-silu", "num_decoder_layers": 1},
        "gelu": {**TINY, "feed_forward_proj": "gelu", "layer_norm_epsilon": 1e-3},
        "buckets": {**TINY, "relative_attention_num_buckets": 32, "d_kv": 8, "n_positions": 64},
    }


class TestMT5(T5Suite):
    """mT5."""

    hf_class = transformers.MT5ForConditionalGeneration
    hf_heads = {  # noqa: RUF012
        "sequence_classification": transformers.MT5ForSequenceClassification,
        "question_answering": transformers.MT5ForQuestionAnswering,
    }
    cases = {"default": UNSCALED, "relu": {**UNSCALED, "feed_forward_proj": "relu"}}  # noqa: RUF012


@pytest.fixture
def tiny() -> T5:
    """A small model of ours, with dropout."""
    return T5.from_config(
        T5Config(vocab_size=40, hidden_size=16, intermediate_size=24, num_heads=2, num_layers=2,
                 head_dim=4, dropout=0.5)
    )  # fmt: skip


def make_ids(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random ids without padding and end tokens."""
    return torch.randint(2, 40, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["t5", "mt5"])
def test_untied_head(kind: str, tmp_path: Path) -> None:
    """A published T5 1.1 has a head of its own; it is kept both ways, and is not scaled."""
    hf_class = {
        "t5": transformers.T5ForConditionalGeneration,
        "mt5": transformers.MT5ForConditionalGeneration,
    }[kind]
    theirs = build_reference(hf_class, UNSCALED)
    theirs.lm_head.weight = nn.Parameter(torch.randn(96, 32))
    theirs.save_pretrained(tmp_path / "a")
    # As the hub has it: written by an older transformers.
    file = tmp_path / "a" / "config.json"
    raw = {**json.loads(file.read_text()), "tie_word_embeddings": False}
    raw.pop("scale_decoder_outputs", None)
    file.write_text(json.dumps(raw))
    ours = T5.from_pretrained(tmp_path / "a")
    assert (ours.config.tie_word_embeddings, ours.config.scale_head) == (False, False)
    ids, targets = make_ids(2, 9), make_ids(2, 5, seed=1)
    want = theirs(ids, decoder_input_ids=targets).logits
    assert_close(ours(ids, decoder_input_ids=targets).logits, want, atol=1e-5)
    ours.save_pretrained(tmp_path / "b")
    back = hf_class.from_pretrained(tmp_path / "b")
    assert_equal_trees(back.state_dict(), theirs.state_dict())
    assert_close(back(ids, decoder_input_ids=targets).logits, want)
    assert T5.from_pretrained(tmp_path / "b").config == ours.config


def test_config_of_the_first_t5(tmp_path: Path) -> None:
    """The oldest files: fields missing, a dead bias, copies of the embedding; same numbers."""
    theirs = build_reference(transformers.T5ForConditionalGeneration, TINY)
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    for name in (
        "tie_word_embeddings",
        "scale_decoder_outputs",
        "num_decoder_layers",
        "dense_act_fn",
        "is_gated_act",
        "feed_forward_proj",
        "classifier_dropout",
    ):
        del raw[name]
    raw |= {"architectures": ["T5WithLMHeadModel"], "n_positions": 512, "output_past": True}
    file.write_text(json.dumps(raw))
    weights = tmp_path / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(weights).items()}
    weights.unlink()
    dead = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    tensors[dead] = torch.ones(8, 4)
    for copied in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"):
        tensors[copied] = tensors["shared.weight"].clone()
    save_file(tensors, weights, metadata={"format": "pt"})
    ours = T5.from_pretrained(tmp_path)
    assert ours.config.tie_word_embeddings
    assert ours.config.scale_head
    assert ours.config.max_distance == 10
    ids, targets = make_ids(2, 9), make_ids(2, 5, seed=1)
    assert_close(
        ours(ids, decoder_input_ids=targets).logits, theirs(ids, decoder_input_ids=targets).logits
    )
    tensors["encoder.embed_tokens.weight"] += 1
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"encoder\.embed_tokens\.weight"):
        T5.from_pretrained(tmp_path)


def test_max_distance_missing() -> None:
    """Configs older than `relative_attention_max_distance` mean 128."""
    raw = transformers.T5Config(**TINY).to_dict()
    del raw["relative_attention_max_distance"]
    assert T5Config.from_hf(raw).max_distance == 128


def test_absent_fields_mean_what_they_mean_in_transformers() -> None:
    """An almost empty config.json is transformers' default config, for both kinds."""
    for kind, hf_class in (("t5", transformers.T5Config), ("mt5", transformers.MT5Config)):
        full = hf_class().to_dict()
        assert T5Config.from_hf({"model_type": kind}) == T5Config.from_hf(full)


def test_contradicting_activation() -> None:
    """Fields that repeat feed_forward_proj must agree with it."""
    raw = transformers.T5Config(**TINY).to_dict()
    with pytest.raises(ConfigError, match=r"dense_act_fn.*contradicts feed_forward_proj"):
        T5Config.from_hf({**raw, "dense_act_fn": "silu"})


def test_model_type_is_remembered() -> None:
    """An mT5 stays one, its classes' names too."""
    config = T5Config.preset("mt5-small")
    out = config.to_hf()
    assert out["model_type"] == "mt5"
    assert out["architectures"] == ["MT5ForConditionalGeneration"]
    assert T5Config.from_hf(out) == config
    with pytest.raises(ConfigError, match="scale_head"):
        config.replace(scale_head=True)


def test_loss_shifts_the_labels(tiny: T5) -> None:
    """Labels alone give what their shifted form gives as the decoder's input."""
    tiny.eval()
    ids, labels = make_ids(2, 9), make_ids(2, 5, seed=1)
    labels[0, 3:] = -100
    shifted = torch.cat([torch.zeros(2, 1, dtype=torch.long), labels[:, :-1]], 1).clamp(min=0)
    explicit = tiny(ids, decoder_input_ids=shifted, labels=labels)
    assert torch.equal(tiny(ids, labels=labels).loss, explicit.loss)
    logits = tiny(ids, decoder_input_ids=shifted).logits
    want = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    assert_close(tiny(ids, labels=labels, num_items_in_batch=11).loss, want / 11)


def test_encoder_runs_once_and_can_be_given(tiny: T5) -> None:
    """`encode` gives what forward computes itself, padding included."""
    tiny.eval()
    ids, targets, mask = make_ids(2, 9), make_ids(2, 5, seed=1), torch.ones(2, 9)
    mask[0, 6:] = 0
    source = tiny.encode(ids, mask)
    given = tiny(encoder_outputs=source, attention_mask=mask, decoder_input_ids=targets)
    assert torch.equal(given.logits, tiny(ids, mask, targets).logits)
    alone = tiny(ids[:1, :6], decoder_input_ids=targets[:1]).logits
    assert_close(given.logits[:1], alone)


def test_padded_targets(tiny: T5) -> None:
    """Padding in the target, on either side, changes nothing for real tokens and makes no NaN."""
    tiny.eval()
    ids, targets, mask = make_ids(2, 9), make_ids(2, 6, seed=1), torch.ones(2, 6)
    mask[0, :2] = 0
    for shown, real in ((mask, slice(2, 6)), (mask.flip(1), slice(0, 4))):
        out = tiny(ids, decoder_input_ids=targets, decoder_attention_mask=shown)
        alone = tiny(ids[:1], decoder_input_ids=targets[:1, real]).logits
        assert_close(out.logits[:1, real], alone)
        out.logits.sum().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in tiny.parameters())


@pytest.mark.parametrize("kind", ["gated-gelu", "relu"])
def test_float16_beyond_its_range(kind: str, tmp_path: Path) -> None:
    """Where residuals leave fp16's range it is as near to fp32 as transformers is, and finite."""
    torch.manual_seed(0)
    theirs = transformers.T5ForConditionalGeneration(
        transformers.T5Config(**{**UNSCALED, "initializer_factor": 1.0, "feed_forward_proj": kind})
    )
    for name, parameter in theirs.named_parameters():
        if "wo.weight" in name or "wi" in name:
            parameter.data.mul_(8000 if "wo" in name else 20)
    theirs.save_pretrained(tmp_path)
    inputs = {"input_ids": make_ids(2, 9), "decoder_input_ids": make_ids(2, 5, seed=1)}
    with torch.no_grad():
        wide = T5.from_pretrained(tmp_path)(**inputs, output_hidden_states=True)
        assert max(x.abs().max() for x in wide.encoder_hidden_states) > 65504
        half = T5.from_pretrained(tmp_path, dtype=torch.float16)(**inputs).logits
        theirs = theirs.from_pretrained(tmp_path, dtype=torch.float16)(**inputs).logits
    assert half.dtype == torch.float16
    error, known = ((x.float() - wide.logits).abs().max() for x in (half, theirs))
    assert error < 2 * known


def test_a_narrowed_residual_stays_finite(tiny: T5) -> None:
    """As in training in fp16, where every block gets and gives fp16: ends of the range, no inf."""
    block = tiny.encoder.layers["0"].half().eval()
    x = torch.full((1, 3, tiny.config.hidden_size), 1e5).half()
    assert x.isinf().all()
    x.requires_grad_()
    out = block(x * 1)
    out.float().sum().backward()
    assert out.isfinite().all()
    assert all(p.grad.isfinite().all() for p in block.parameters())


def test_a_source_of_padding_alone(tiny: T5) -> None:
    """It has no label: loss and gradients are those of the other row, and finite."""
    tiny.eval()
    ids, labels, mask = make_ids(2, 9), make_ids(2, 5, seed=1), torch.ones(2, 9)
    mask[0], labels[0] = 0, -100
    results = []
    for rows in (slice(0, 2), slice(1, 2)):
        tiny.zero_grad()
        loss = tiny(ids[rows], mask[rows], labels=labels[rows]).loss
        loss.backward()
        results.append({n: p.grad for n, p in tiny.named_parameters()} | {"loss": loss.detach()})
    assert_close(results[0], results[1])
    with torch.no_grad():
        assert tiny(ids, mask, labels=labels).loss.isfinite()


def test_dropout_is_where_transformers_has_it(tiny: T5) -> None:
    """One number drops in the embedding, attention, MLP and residual, and after the last norms."""
    block = tiny.decoder.layers["0"]
    places = (tiny.encoder, tiny.decoder, block, block.mlp, block.attn, block.cross_attn)
    assert [place.dropout for place in places] == [0.5] * 6
    ids, targets = make_ids(1, 5), make_ids(1, 4, seed=1)
    tiny.train()
    drawn = tiny(ids, decoder_input_ids=targets).last_hidden_state
    assert 0.3 < (drawn == 0).float().mean() < 0.7
    tiny.eval()
    assert (tiny(ids, decoder_input_ids=targets).last_hidden_state != 0).all()


def test_bad_inputs(tiny: T5) -> None:
    """What is missing, or outside the vocabulary, is said."""
    ids = make_ids(2, 4)
    with pytest.raises(ShapeError, match="input_ids, inputs_embeds or encoder_outputs"):
        tiny(decoder_input_ids=ids)
    with pytest.raises(ShapeError, match="the decoder has no input"):
        tiny(ids)
    for wrong in ({"input_ids": ids + 40, "labels": ids}, {"input_ids": ids, "labels": ids + 40}):
        with pytest.raises(ShapeError, match="vocab_size=40"):
            tiny(**wrong)
    classifier = T5.from_config(tiny.config.replace(head="sequence_classification"))
    with pytest.raises(ShapeError, match=r"sequences \[0, 1\] have no end-of-sequence token"):
        classifier(ids)


def test_encoder_of_a_whole_checkpoint(
    tiny: T5, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The encoder alone opens from a whole model and says what it leaves out."""
    tiny.save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO):
        encoder = T5.from_pretrained(tmp_path, head="encoder")
    assert encoder.decoder is None
    ids = make_ids(2, 6)
    want = tiny.eval().encode(ids).last_hidden_state
    assert torch.equal(encoder(ids).last_hidden_state, want)


# The sizes transformers reports for the published checkpoints: `num_parameters` of their classes
# before version 5, which ties all heads.
SIZES = {
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "t5-v1_1-small": 76_961_152,
    "t5-v1_1-base": 247_577_856,
    "t5-v1_1-large": 783_150_080,
    "t5-v1_1-xl": 2_849_757_184,
    "t5-v1_1-xxl": 11_135_332_352,
    "mt5-small": 300_176_768,
    "mt5-base": 582_401_280,
    "mt5-large": 1_229_581_312,
    "mt5-xl": 3_742_619_648,
    "mt5-xxl": 12_921_057_280,
    "mengzi-t5-base": 247_577_856,
    "flan-t5-small": 76_961_152,
    "flan-t5-base": 247_577_856,
    "flan-t5-large": 783_150_080,
    "flan-t5-xl": 2_849_757_184,
    "flan-t5-xxl": 11_135_332_352,
}


@pytest.mark.parametrize("name", list(SIZES))
def test_preset_sizes(name: str) -> None:
    """Every preset has the published number of parameters."""
    assert count_preset(T5, name) == SIZES[name]


def check_preset(name: str) -> None:
    """Compare a preset's shapes with transformers', whose class ties every head."""
    config = T5Config.preset(name)
    ours = T5.from_config(config, device="meta")
    fields = {k: v for k, v in config.to_hf().items() if k != "model_type"}
    hf_class = getattr(transformers, fields["architectures"][0])
    with torch.device("meta"):
        theirs = hf_class(hf_class.config_class(**fields))
    shapes = {
        rule.source: rule.source_shape(tuple(ours.get_parameter(rule.parameter).shape))
        for rule in ours.active_rules()
    }
    want = {n: tuple(p.shape) for n, p in theirs.named_parameters()}
    if not config.tie_word_embeddings:
        want["lm_head.weight"] = tuple(theirs.lm_head.weight.shape)
    assert shapes == want


def test_preset_shapes() -> None:
    """Presets' shapes are transformers'."""
    check_preset("t5-small")
    check_preset("mt5-small")


@pytest.mark.long
@pytest.mark.parametrize("name", list(T5Config.presets))
def test_every_preset_shapes(name: str) -> None:
    """Every preset's shapes are transformers'."""
    assert set(T5Config.presets) == set(SIZES)
    check_preset(name)


def test_costs() -> None:
    """FLOPs and cache bytes of a pair of tokens, counted by hand for T5-small."""
    config = T5Config.preset("t5-small")
    square, mlp = 512 * 512, 512 * 2048
    weights = 6 * (4 * square + 2 * mlp) + 6 * (8 * square + 2 * mlp) + 32128 * 512
    assert config.flops_per_token(128) == 6 * weights + 12 * (6 + 6 + 6) * 512 * 128
    assert config.kv_bytes_per_token() == 2 * 2 * 6 * 512 * 2

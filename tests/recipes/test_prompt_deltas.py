"""Soft rows of a template and a delta, trained together: saved, gone on with, merged."""

from __future__ import annotations

import json

import pytest
import torch

from bmforge.cli import main
from bmforge.models import GPT2, Bert, BertConfig, GPT2Config
from bmforge.testing import assert_close
from bmforge.tokenizers import AutoTokenizer
from bmforge.tune.delta import Lora, load_delta
from bmforge.tune.prompt import ManualVerbalizer, PromptClassifier, Template, read_template

MARKS = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
WORDS = ["it", "was", "good", "bad", "film", "we", "loved", "hated", "the", "yes", "no"]
SIZES = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "max_seq_len": 48, "init_std": 0.2}
TEXT = '{"placeholder":"text_a"} {"soft":"it was"}{"soft"} {"mask"}'
ROWS = [{"text": f"we {word} the film", "label": label}
        for word, label in (("loved", "yes"), ("hated", "no"))] * 2  # fmt: skip
EXAMPLES = [{"text_a": row["text"]} for row in ROWS]
NUM_ROWS = 5  # two in front, two of words and one drawn


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("prompts")
    size = 5 + len(WORDS)
    for kind, model in (
        ("bert", Bert.from_config(BertConfig(vocab_size=size, intermediate_size=48,
                                             head="masked_lm", **SIZES))),
        ("gpt2", GPT2.from_config(GPT2Config(vocab_size=size, **SIZES))),
    ):  # fmt: skip
        model.save_pretrained(root / kind)
        (root / kind / "vocab.txt").write_text("\n".join([*MARKS.values(), *WORDS]) + "\n")
        told = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, **MARKS}
        told |= {"eos_token": "[SEP]"} if kind == "gpt2" else {}
        (root / kind / "tokenizer_config.json").write_text(json.dumps(told))
    (root / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n")
    (root / "template.txt").write_text(TEXT + "\n")
    (root / "words.json").write_text(json.dumps({"no": ["bad"], "yes": ["good"]}))
    return root


LORA = ("--adapter.kind", "lora", "--adapter.rank", "4")


def train(place, run, *words, steps, task="prompt-classify", kind="bert", delta=LORA):
    told = () if task == "prompt-generate" else ("--verbalizer", str(place / "words.json"))
    return main([
        "train", task, "--model", str(place / kind), "--run-dir", str(run),
        "--data.labels", "no", "yes", "--data", str(place / "rows.jsonl"),
        "--data.validation", str(place / "rows.jsonl"), "--steps", str(steps), "--lr", "0.02",
        "--batch-size", "4", "--micro-batch-size", "2", "--seq-len", "24", "--soft-front", "2",
        "--template", str(place / "template.txt"), "--train.schedule.kind", "constant",
        *delta, *told, *words,
    ])  # fmt: skip


def open_trained(place, run):
    """The base, the template on it, and then what the run has exported."""
    model = Bert.from_pretrained(place / "bert")
    tokenizer = AutoTokenizer.from_pretrained(place / "bert")
    text = read_template(run / "prompt" / "template.txt")
    template = Template(text, tokenizer, model, front=2)
    begun = model.embed.prompt.weight.detach().clone()
    delta = load_delta(model, run / "export")
    words = ManualVerbalizer([["bad"], ["good"]], tokenizer)
    return PromptClassifier(model, template, words), delta, begun


def test_rows_and_a_delta_learn_together_and_go_on(place, tmp_path):
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert train(place, whole, steps=30) == 0
    assert json.loads((whole / "results.json").read_text())["accuracy"]["model"] == 1.0
    classifier, delta, begun = open_trained(place, whole)
    assert isinstance(delta, Lora)
    rows = classifier.model.embed.prompt.weight
    assert rows.shape == (NUM_ROWS, 32)
    assert bool((rows != begun).any(1).all())  # all of them were trained
    assert all(bool(part.up.any()) for _, _, part in delta.held)
    trained = {n for n, p in classifier.model.named_parameters() if p.requires_grad}
    assert trained == {*delta.names(), "embed.prompt.weight"}
    found = classifier.classify(EXAMPLES).argmax(-1).tolist()
    assert found == [int(row["label"] == "yes") for row in ROWS]
    assert "load_delta" in (whole / "prompt" / "README.md").read_text()
    # Stopped on the way and gone on with, it ends at the same numbers.
    for steps in (11, 30):
        assert train(place, parted, steps=steps) == 0
    again, _, _ = open_trained(place, parted)
    assert torch.equal(again.model.embed.prompt.weight, rows)
    assert torch.equal(again.classify(EXAMPLES), classifier.classify(EXAMPLES))


@pytest.mark.long
def test_merged_it_is_a_model_with_rows(place, tmp_path):
    alone, merged = tmp_path / "alone", tmp_path / "merged"
    assert train(place, alone, steps=8) == 0
    assert train(place, merged, "--adapter.merge", steps=8) == 0
    want, _, _ = open_trained(place, alone)
    model = Bert.from_pretrained(merged / "export")
    assert model.embed.prompt.weight.shape == (NUM_ROWS, 32)
    prompts = [want.template.encode(one) for one in EXAMPLES]
    batch = want.collate(prompts)
    got = PromptClassifier(model, want.template, want.verbalizer)
    found, wanted = (one(**batch).class_logits for one in (got, want))
    assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["adapter", "prefix", "bitfit"])
def test_other_deltas_beside_rows(place, tmp_path, kind):
    run = tmp_path / "run"
    assert train(place, run, steps=3, delta=("--adapter.kind", kind)) == 0
    classifier, _, begun = open_trained(place, run)
    assert bool((classifier.model.embed.prompt.weight != begun).any(1).all())


@pytest.mark.long
def test_texts_are_learned_by_rows_and_a_delta(place, tmp_path):
    run = tmp_path / "run"
    words = ("--max-new-tokens", "3")
    assert train(place, run, *words, steps=60, task="prompt-generate", kind="gpt2") == 0
    assert json.loads((run / "results.json").read_text())["accuracy"]["model"] == 1.0
    model = GPT2.from_pretrained(place / "gpt2")
    tokenizer = AutoTokenizer.from_pretrained(place / "gpt2")
    Template(TEXT, tokenizer, model, front=2)
    load_delta(model, run / "export")


def test_a_second_set_of_rows_is_refused(place, tmp_path, capsys):
    assert train(place, tmp_path / "run", steps=1, delta=("--adapter.kind", "soft-prompt")) == 2
    assert "would replace" in " ".join(capsys.readouterr().err.split())

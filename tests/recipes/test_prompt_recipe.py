"""`prompt-classify` and `prompt-generate` on tiny models, files of prompts, `bmforge prompt`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bmforge.cli import main
from bmforge.errors import ConfigError
from bmforge.models import GPT2, Bert, BertConfig, GPT2Config
from bmforge.tokenizers import AutoTokenizer
from bmforge.tune.prompt import ManualVerbalizer, PromptClassifier, Template, read_template
from bmforge.tune.prompt.files import read_verbalizer

WORDS = [
    "it",
    "was",
    "good",
    "bad",
    "a",
    "film",
    ",",
    "we",
    "loved",
    "hated",
    "the",
    "story",
    "of",
    "no",
    "yes",
    "topic",
    "is",
    "text",
    ":",
    "answer",
]
MARKS = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
SIZES = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "max_seq_len": 48, "init_std": 0.2}
ROWS = [
    {"text": "we loved the film", "label": "yes"},
    {"text": "we hated the film", "label": "no"},
    {"text": "we loved the story of it", "label": "yes"},
    {"text": "we hated the story", "label": "no"},
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("prompts")
    for kind, family, config in (
        ("bert", Bert, BertConfig(vocab_size=5 + len(WORDS), intermediate_size=48,
                                  head="masked_lm", **SIZES)),
        ("gpt2", GPT2, GPT2Config(vocab_size=5 + len(WORDS), **SIZES)),
    ):  # fmt: skip
        family.from_config(config).save_pretrained(root / kind)
        (root / kind / "vocab.txt").write_text("\n".join([*MARKS.values(), *WORDS]) + "\n")
        marks = MARKS | {"eos_token": "[SEP]"} if kind == "gpt2" else MARKS
        told = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, **marks}
        (root / kind / "tokenizer_config.json").write_text(json.dumps(told))
    for name in ("train", "dev"):
        (root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n")
    lines = [
        '{"placeholder":"text_a"} it was {"mask"}',
        '{"placeholder":"text_a"} {"soft"} {"mask"}',
    ]
    (root / "template.txt").write_text("\n".join(lines) + "\n")
    words = {"no": ["bad"], "yes": ["good"]}
    (root / "words.json").write_text(json.dumps([words, words]))
    return root


def train(place, run, *words, task="prompt-classify", kind="bert", steps=20):
    return main([
        "train", task, "--model", str(place / kind), "--run-dir", str(run),
        "--data.labels", "no", "yes", "--data", str(place / "train.jsonl"),
        "--data.validation", str(place / "dev.jsonl"), "--steps", str(steps), "--lr", "0.01",
        "--batch-size", "4", "--micro-batch-size", "2", "--seq-len", "24", *words,
    ])  # fmt: skip


def results(run):
    return json.loads((run / "results.json").read_text())


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_class_is_learned_and_the_prompt_lies_beside_the_export(place, tmp_path, kind):
    run = tmp_path / "run"
    told = ("--template", str(place / "template.txt"), "--verbalizer", str(place / "words.json"))
    assert train(place, run, *told, kind=kind) == 0
    assert results(run)["accuracy"]["model"] == 1.0
    assert read_template(run / "prompt" / "template.txt") == read_template(place / "template.txt")
    words = read_verbalizer(run / "prompt" / "verbalizer.json", 0, ["no", "yes"])
    assert words == [["bad"], ["good"]]
    assert "prompt" in (run / "prompt" / "README.md").read_text()
    # What was exported classifies so outside of the run too.
    family = {"bert": Bert, "gpt2": GPT2}[kind]
    model = family.from_pretrained(run / "export")
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    template = Template(read_template(run / "prompt" / "template.txt"), tokenizer, model)
    classifier = PromptClassifier(model, template, ManualVerbalizer(words, tokenizer))
    found = classifier.classify([{"text_a": row["text"]} for row in ROWS])
    assert found.argmax(-1).tolist() == [row["label"] == "yes" for row in ROWS]


def test_soft_rows_alone_are_trained_and_saved(place, tmp_path):
    run = tmp_path / "run"
    told = ("--template", str(place / "template.txt"), "--choice", "1", "--freeze-base",
            "--verbalizer", str(place / "words.json"), "--soft-front", "2")  # fmt: skip
    assert train(place, run, *told, steps=3) == 0
    before, after = (Bert.from_pretrained(p) for p in (place / "bert", run / "export"))
    assert after.embed.prompt.weight.shape == (3, 32)
    assert torch.equal(before.embed.weight, after.embed.weight)
    assert train(place, run, *told, steps=5) == 0  # it goes on


@pytest.mark.long
def test_few_of_many_several_times_zero_shot_calibrated_and_with_a_delta(place, tmp_path):
    run, told = tmp_path / "run", ("--verbalizer", str(place / "words.json"))
    assert train(place, run, *told, "--data.shots", "1", "--data.seeds", "2") == 0
    one, two = (results(run / f"seed-{n}")["accuracy"]["model"] for n in range(2))
    assert results(run)["accuracy"]["mean"] == pytest.approx((one + two) / 2)
    run = tmp_path / "zero"
    assert train(place, run, *told, "--zero-shot", "--calibrate", "4") == 0
    before, after = (Bert.from_pretrained(p) for p in (place / "bert", run / "export"))
    assert all(map(torch.equal, before.parameters(), after.parameters()))
    run = tmp_path / "lora"
    assert train(place, run, *told, "--adapter.kind", "lora", "--adapter.rank", "4", steps=100) == 0
    assert results(run)["accuracy"]["model"] == 1.0
    run = tmp_path / "joint"
    assert train(place, run, *told, "--join", "joint", kind="gpt2") == 0
    assert results(run)["accuracy"]["model"] == 1.0


@pytest.mark.long
def test_texts_are_learned(place, tmp_path):
    run = tmp_path / "run"
    told = ("--template", str(place / "template.txt"), "--max-new-tokens", "3")
    assert train(place, run, *told, task="prompt-generate", kind="gpt2", steps=40) == 0
    assert results(run)["accuracy"]["model"] == 1.0


def test_what_a_template_makes_is_shown(place, capsys):
    told = ["prompt", "--model", str(place / "bert"), "--data.labels", "no", "yes",
            "--data.paths", str(place / "train.jsonl"), "--examples", "1",
            "--verbalizer", str(place / "words.json")]  # fmt: skip
    assert main([*told, '{"placeholder":"text_a"} it was {"mask"}']) == 0
    said = capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(place / "bert")
    ids = tokenizer.encode("we loved the film it was")
    assert " ".join(map(str, ids)) in said
    assert "masked" in said
    assert f"good = {tokenizer.token_to_id('good')}" in said
    assert main([*told, "no mask"]) == 2
    assert 'Add {"mask"}' in capsys.readouterr().err


def test_files_of_words(tmp_path):
    def write(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    lines = write("a.txt", "bad, awful\ngood\n\nno\nyes,yeah\n")
    assert read_verbalizer(lines) == [["bad", "awful"], ["good"]]
    assert read_verbalizer(lines, 1) == [["no"], ["yes", "yeah"]]
    for name, text in (
        ("b.json", '{"n": ["bad"], "p": "good"}'),
        ("c.json", '[{"n": ["bad"], "p": "good"}]'),
        ("d.jsonl", '{"p": "good", "n": ["bad"]}\n'),
        ("e.json", '[["bad"], ["good"]]'),
        ("f.json", '[[["bad"], ["good"]]]'),
    ):
        assert read_verbalizer(write(name, text), 0, ["n", "p"]) == [["bad"], ["good"]], name
    for name, text, said in (
        ("g.json", "{", "is not valid JSON"),
        ("h.json", '{"x": ["bad"], "p": "good"}', "classes are n, p"),
        ("i.txt", "bad\n", "words for 1 classes"),
        ("j.json", "3", "is not a verbalizer"),
    ):
        with pytest.raises(ConfigError, match=said):
            read_verbalizer(write(name, text), 0, ["n", "p"])
    with pytest.raises(ConfigError, match="choice=2"):
        read_verbalizer(lines, 2)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_verbalizer(tmp_path / "none.txt")

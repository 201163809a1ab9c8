"""A third party's template and verbalizer class, in one file each, through the recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from best_word import BestWord
from quoted_template import QuotedTemplate

from bmforge.cli import main
from bmforge.errors import ConfigError
from bmforge.models import Bert, BertConfig
from bmforge.recipes.inputs.prompt_parts import find_class
from bmforge.testing.template_suite import TemplateSuite
from bmforge.testing.verbalizer_suite import VerbalizerSuite
from bmforge.tokenizers import AutoTokenizer
from bmforge.tune.prompt import PromptClassifier, Template, read_template

HERE = Path(__file__).parent
TEXT = '{"placeholder":"text_a"} it was {"mask"}'
ROWS = [{"text": f"we {word} the film", "label": label}
        for word, label in (("loved", "yes"), ("hated", "no"))] * 2  # fmt: skip


class TestQuoted(TemplateSuite):
    template_class = QuotedTemplate


class TestBestWord(VerbalizerSuite):
    def make(self, tokenizer, model):
        return BestWord({"no": ["<!>b", "<!>d"], "yes": ["<!>g"]}, tokenizer)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("own")
    marks = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    words = ["it", "was", "good", "bad", "fine", "film", ",", "we", "loved", "hated", "the"]
    config = BertConfig(
        vocab_size=5 + len(words), hidden_size=32, num_layers=1, num_heads=2, max_seq_len=48,
        intermediate_size=48, init_std=0.2, head="masked_lm",
    )  # fmt: skip
    Bert.from_config(config).save_pretrained(root / "bert")
    (root / "bert" / "vocab.txt").write_text("\n".join([*marks.values(), *words]) + "\n")
    told = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, **marks}
    (root / "bert" / "tokenizer_config.json").write_text(json.dumps(told))
    (root / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n")
    (root / "template.txt").write_text(TEXT + "\n")
    (root / "words.json").write_text(json.dumps({"no": ["bad"], "yes": ["good", "fine"]}))
    return root


def train(place, run, *words):
    return main([
        "train", "prompt-classify", "--model", str(place / "bert"), "--run-dir", str(run),
        "--data.labels", "no", "yes", "--data", str(place / "rows.jsonl"),
        "--data.validation", str(place / "rows.jsonl"), "--steps", "5", "--lr", "0.01",
        "--batch-size", "4", "--micro-batch-size", "2", "--seq-len", "24",
        "--template", str(place / "template.txt"), "--verbalizer", str(place / "words.json"),
        *words,
    ])  # fmt: skip


def test_classes_in_files_of_ones_own_run_through_the_recipe(place, tmp_path):
    run = tmp_path / "run"
    own = ("--template-class", f"{HERE / 'quoted_template.py'}:QuotedTemplate",
           "--verbalizer-class", "best_word:BestWord")  # fmt: skip
    assert train(place, run, *own) == 0
    results = json.loads((run / "results.json").read_text())
    assert "quoted_template.py:QuotedTemplate" in (run / "prompt" / "README.md").read_text()
    words = json.loads((run / "prompt" / "verbalizer.json").read_text())
    assert words == {"no": ["bad"], "yes": ["good", "fine"]}
    # The run asked as the class does, not as the base: the export answers its prompts.
    model = Bert.from_pretrained(run / "export")
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    text = read_template(run / "prompt" / "template.txt")
    ids = {kind: kind(text, tokenizer, model).encode({"text_a": "film"}).input_ids
           for kind in (Template, QuotedTemplate)}  # fmt: skip
    assert ids[QuotedTemplate].count(tokenizer.token_to_id(",")) == 2
    assert len(ids[QuotedTemplate]) == len(ids[Template]) + 2
    classifier = PromptClassifier(
        model, QuotedTemplate(text, tokenizer, model), BestWord(words, tokenizer)
    )
    scores = classifier.eval().classify([{"text_a": row["text"]} for row in ROWS])
    labels = torch.tensor([int(row["label"] == "yes") for row in ROWS])
    right = (scores.argmax(-1) == labels).float().mean()
    assert results["accuracy"]["model"] == float(right)
    loss = torch.nn.functional.cross_entropy(scores, labels)
    assert results["validation loss"]["model"] == pytest.approx(float(loss), rel=1e-4)


def test_what_is_no_class_is_said(place, tmp_path):
    for given, said in (
        ("best_word", "must be package.module:Class"),
        ("best_word.BestWord:", "must be package.module:Class"),
        ("no_such_module:X", "cannot be imported"),
        ("no/such/file.py:X", "does not exist"),
        ("best_word:BestWrd", "Did you mean 'BestWord'"),
        ("best_word:nn", "must be a class that inherits Template"),
        ("best_word:BestWord", "inherits Template"),
    ):
        with pytest.raises(ConfigError, match=said):
            find_class(given, "template_class", Template)
    again = [find_class(f"{HERE / 'quoted_template.py'}:QuotedTemplate", "x", Template)] * 2
    assert again[0] is again[1]


def test_verbalizers_that_a_run_cannot_use_are_refused(place, tmp_path, capsys):
    for name, said in (("Silent", "has no takes"), ("Trained", "has parameters (weight)")):
        assert train(place, tmp_path / name, "--verbalizer-class", f"best_word:{name}") == 2
        assert said in " ".join(capsys.readouterr().err.split())
    zero = ("--verbalizer-class", "best_word:Trained", "--zero-shot")
    assert train(place, tmp_path / "zero", *zero) == 0


def test_layers_that_make_rows_are_refused_by_a_run(place, tmp_path, capsys):
    soft = tmp_path / "soft.txt"
    soft.write_text('{"placeholder":"text_a"} {"soft"} {"mask"}\n')
    own = ("--template-class", "bmforge.tune.prompt:PTuning", "--template", str(soft))
    assert train(place, tmp_path / "run", *own) == 2
    assert "encoder='lstm' has no effect" in " ".join(capsys.readouterr().err.split())

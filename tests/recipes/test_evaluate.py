"""`bmforge evaluate`: figures against transformers, training's own, and other layouts."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import write_jsonl
from task_folders import (
    MODELS,
    run_task,
    task_config,
    write_boolq,
    write_squad,
    write_words,
)
from test_sft import write_letters

from bmforge.cli import main
from bmforge.data import TokenStoreWriter
from bmforge.errors import ConfigError, DataError
from bmforge.models import GPT2, GPT2Config, Llama, LlamaConfig
from bmforge.models.bert import Bert
from bmforge.models.changes import Change
from bmforge.parallel import Layout
from bmforge.recipes.adapters import AdapterConfig
from bmforge.recipes.evaluate import EvaluateConfig, evaluate_model
from bmforge.testing import run_distributed

TEXT = "the cat sat on the mat, and so did the dog.\n" * 2 + "the end."
OTHER = "no."


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 of letters with what it is evaluated on; returns the folder of all."""
    root = tmp_path_factory.mktemp("subject")
    write_letters(root / "model", tokenizer_class="PreTrainedTokenizerFast")
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_layers": 2, "num_heads": 2}
    torch.manual_seed(0)
    model = GPT2.from_config(GPT2Config(**sizes, max_seq_len=24, init_std=0.3))
    model.save_pretrained(root / "model")
    write_jsonl(root / "texts.jsonl", [{"text": TEXT}, {"text": OTHER}])
    with TokenStoreWriter(root / "tokens", vocab_size=40) as writer:
        for start in (3, 11):
            writer.add_item([(start + 7 * n) % 40 for n in range(30)])
            writer.end_document()
    return root


def losses_of(model: Any, rows: list[tuple[list[int], int]]) -> float:
    """Nats of the tokens from a place on, of every row, by transformers' model."""
    total = 0.0
    with torch.no_grad():
        for ids, first in rows:
            scores = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            picked = scores[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
            total -= float(picked[first - 1 :].sum())
    return total


def rows_of(ids: list[int], begin: int, longest: int) -> list[tuple[list[int], int]]:
    """Rows in which each token is predicted once, the last one with all it has room for."""
    ids, rows, done = [begin, *ids], [], 1
    while done < len(ids):
        end = min(len(ids), done + longest - 1)
        start = max(0, end - longest)
        rows.append((ids[start:end], done - start))
        done = end
    return rows


def test_texts_are_what_transformers_says(subject: Path, tmp_path: Path) -> None:
    """Every token is predicted once, after the begin token or with a token of context."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(subject / "model").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(subject / "model")
    encoded = [tokenizer(t, add_special_tokens=False)["input_ids"] for t in (TEXT, OTHER)]
    rows = [row for ids in encoded for row in rows_of(ids, tokenizer.bos_token_id, 24)]
    nats, count = losses_of(theirs, rows), sum(map(len, encoded))
    file = str(subject / "texts.jsonl")
    config = EvaluateConfig(text=(file,), micro_batch_size=4, out=tmp_path / "new" / "a.json")
    found = evaluate_model(str(subject / "model"), config)
    assert found["perplexity"][file] == pytest.approx(math.exp(nats / count), rel=1e-5)
    size = len(TEXT.encode()) + len(OTHER)
    assert found["bits per byte"][file] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    told = json.loads((tmp_path / "new" / "a.json").read_text())
    assert told["results"] == found
    assert told["settings"]["micro_batch_size"] == 4
    assert told["settings"]["seq_len"] == 24  # the model's positions
    with pytest.raises(ConfigError, match="already exists"):
        evaluate_model(str(subject / "model"), config)


def test_line_ends_and_encodings_do_not_change_the_perplexity(
    subject: Path, tmp_path: Path
) -> None:
    """The evaluated text is the one that `prepare` stores, which a model is trained on."""
    write_jsonl(tmp_path / "stored.jsonl", [{"text": TEXT}])
    for name, end in {"lf": "\n", "crlf": "\r\n", "cr": "\r", "blanks": " \t\n"}.items():
        text = (TEXT + "\n").replace("\n", end)
        (tmp_path / f"{name}.txt").write_bytes(text.encode("utf-16" if name == "cr" else "utf-8"))
    files = tuple(str(path) for path in tmp_path.iterdir())
    results = evaluate_model(str(subject / "model"), EvaluateConfig(text=files))
    assert len(files) == len(results["perplexity"]) == 5
    assert all(len(set(values.values())) == 1 for values in results.values())


def test_a_gguf_file_has_the_figures_of_its_directory(subject: Path, tmp_path: Path) -> None:
    folder, file = tmp_path / "model", tmp_path / "model.gguf"
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_layers": 2, "num_heads": 2}
    Llama.from_config(LlamaConfig(**sizes, max_seq_len=24, init_std=0.3)).save_pretrained(folder)
    assert main(["convert", str(folder), str(file), "--type", "f32"]) == 0
    config = EvaluateConfig(prepared=(str(subject / "tokens"),))
    want, got = (evaluate_model(str(path), config) for path in (folder, file))
    assert want.keys() == got.keys()
    for metric, values in want.items():
        for name, value in values.items():
            assert got[metric][name] == pytest.approx(value, rel=1e-5)


def test_a_store_is_read_in_the_rows_of_training(subject: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(subject / "model").eval()
    stream = np.fromfile(subject / "tokens.bin", dtype=np.uint16).tolist()
    assert len(stream) == 60
    rows = [(stream[start : start + 10], 1) for start in range(0, 59, 9)]
    nats = losses_of(theirs, rows)
    config = EvaluateConfig(prepared=(str(subject / "tokens"),), seq_len=10)
    found = evaluate_model(str(subject / "model"), config)
    assert found == {"perplexity": {str(subject / "tokens"): pytest.approx(math.exp(nats / 59))}}


def figures_on(subject: Path, layout: Layout) -> dict[str, dict[str, float]]:
    file = str(subject / "texts.jsonl")
    config = EvaluateConfig(text=(file,), micro_batch_size=2, seq_len=16)
    return evaluate_model(str(subject / "model"), config, layout)


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, Layout(tp=2)),
        (2, Layout(pp=2)),
        pytest.param(2, Layout(zero=3), marks=pytest.mark.long),
        pytest.param(2, Layout(cp=2), marks=pytest.mark.long),
        pytest.param(4, Layout(zero=2, tp=2), marks=pytest.mark.long),
    ],
)
def test_layouts_say_the_same(world: int, layout: Layout, subject: Path) -> None:
    (want,) = run_distributed(figures_on, 1, subject, Layout())
    for found in run_distributed(figures_on, world, subject, layout):
        for metric, values in want.items():
            assert found[metric] == pytest.approx(values, rel=1e-5)


def test_a_changed_model_and_weights_of_a_preset(
    subject: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A low-rank part with weights counts; a preset's sizes are filled from a directory."""
    file = str(subject / "texts.jsonl")
    config = EvaluateConfig(text=(file,))
    plain = evaluate_model(str(subject / "model"), config)
    model = GPT2.from_pretrained(subject / "model")
    model.change_(Change("low_rank", "layers.*.attn.q_proj", {"rank": 2}), seed=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "low_rank" in name or ".up" in name or ".down" in name:
                parameter.add_(
                    torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
                )
    model.save_pretrained(tmp_path / "changed")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "changed" / name).write_bytes((subject / "model" / name).read_bytes())
    changed = evaluate_model(str(tmp_path / "changed"), config)
    pieces = model.eval()
    nats = 0.0
    from bmforge.infer.score import roll_windows
    from bmforge.tokenizers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(subject / "model")
    for text in (TEXT, OTHER):
        for prompt, answer in roll_windows(tokenizer.encode(text), [tokenizer.bos_id], 24):
            labels = torch.tensor([[-100] * len(prompt) + answer])
            out = pieces(torch.tensor([prompt + answer]), labels=labels, num_items_in_batch=1.0)
            nats += float(out.loss.detach())
    count = len(TEXT) + len(OTHER)
    assert changed["perplexity"][file] == pytest.approx(math.exp(nats / count), rel=1e-5)
    assert changed["perplexity"][file] != pytest.approx(plain["perplexity"][file], rel=1e-3)
    sizes = GPT2.from_pretrained(subject / "model").config.replace(raw={})
    values = {f.name: getattr(sizes, f.name) for f in dataclasses.fields(sizes) if f.init}
    monkeypatch.setitem(GPT2Config.presets, "gpt2-letters", values)
    weights = str(subject / "model")
    again = evaluate_model("gpt2-letters", EvaluateConfig(text=(file,), weights=weights))
    assert again == plain
    with pytest.raises(ConfigError, match="a preset without weights"):
        evaluate_model("gpt2-letters", config)


@pytest.mark.parametrize(
    ("recipe", "task"),
    [("bert-superglue", "BoolQ"), ("llama-superglue", "BoolQ"), ("t5-squad", "SQuAD")],
)
def test_tasks_are_scored_as_in_training(
    recipe: str, task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run's own figures come again from its export, and stand beside them in its report."""
    words = write_words(tmp_path / "words")
    folder = write_squad(tmp_path) if task == "SQuAD" else write_boolq(tmp_path)
    config = task_config(recipe, task, folder, words, tmp_path / "run", 3)
    if task == "SQuAD":
        config.max_new_tokens = 5
    wanted = run_task(recipe, config)[1]
    command = ["evaluate", str(tmp_path / "run"), "--tasks", task.lower()]
    command += ["--task-data", str(folder), "--max-new-tokens", "5", "--micro-batch-size", "3"]
    capsys.readouterr()
    assert main(command) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert shown == [[metric, task.lower(), f"{value:.4f}"] for metric, value in wanted.items()]
    told = json.loads((tmp_path / "run" / "results.json").read_text())
    for metric, value in wanted.items():
        assert told[metric] == {"model": value, task.lower(): value}
    page = (tmp_path / "run" / "report.html").read_text()
    assert f"<th>{task.lower()}</th>" in page


OWN = [
    {"text": "the sky is good", "label": "rose", "id": 1},
    {"text": "the mud is good", "label": "fell", "id": 2},
    {"text": "the fire", "label": "rose", "id": 3},
    {"text": "stone", "label": "fell", "id": 4},
]


@pytest.mark.parametrize("recipe", ["bert-superglue", "gpt2-superglue", "t5-superglue"])
def test_a_task_of_ones_own(recipe: str, tmp_path: Path) -> None:
    """Lines and a list of labels are a task, for every kind of model; its labels are exported."""
    words = write_words(tmp_path / "words")
    train, dev = (str(write_jsonl(tmp_path / f"{n}.jsonl", OWN)) for n in ("train", "dev"))
    steps = 5 if recipe == "t5-superglue" else 40  # which takes longer to learn it
    config = task_config(recipe, "BoolQ", Path("x"), words, tmp_path / "run", steps)
    config.data = dataclasses.replace(
        config.data, task=None, labels=("fell", "rose"), paths=(train,), validation=(dev,)
    )
    wanted = run_task(recipe, config)[1]
    if recipe != "t5-superglue":
        assert wanted == {"accuracy": 1.0}
    labels = () if recipe == "bert-superglue" else ("fell", "rose")
    asked = EvaluateConfig(tasks=(dev,), labels=labels)
    assert evaluate_model(str(tmp_path / "run"), asked) == {"accuracy": {dev: wanted["accuracy"]}}
    if not labels:
        told = json.loads((tmp_path / "run" / "export" / "config.json").read_text())
        assert told["id2label"] == {"0": "fell", "1": "rose"}
        return
    with pytest.raises(ConfigError, match="Pass the labels with --labels"):
        evaluate_model(str(tmp_path / "run"), EvaluateConfig(tasks=(dev,)))


@pytest.mark.parametrize("adapter", [None, "lora"])
def test_labels_are_matched_by_name(adapter: str | None, tmp_path: Path) -> None:
    """In any order of the labels, evaluation counts what transformers' names say."""
    transformers = pytest.importorskip("transformers")
    words, dev = write_words(tmp_path / "words"), str(write_jsonl(tmp_path / "dev.jsonl", OWN))
    Bert.from_config(MODELS["bert"], seed=0).save_pretrained(tmp_path / "base")
    config = task_config(
        *("bert-superglue", "BoolQ", Path("x"), words, tmp_path / "run", 40),
        **{"init_from": str(tmp_path / "base"), "new_head": True},
        adapter=AdapterConfig(kind=adapter),
    )
    config.data = dataclasses.replace(
        config.data, task=None, labels=("rose", "fell"), paths=(dev,), validation=(dev,)
    )
    run_task("bert-superglue", config)
    export = tmp_path / "run" / "export"
    if adapter is not None:
        assert main(["merge", str(export), "--out", str(tmp_path / "merged")]) == 0
        export = tmp_path / "merged"
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(export).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(words)
    right = 0
    for row in OWN:
        ids = tokenizer(row["text"], return_tensors="pt")["input_ids"]
        right += theirs.config.id2label[int(theirs(ids).logits.argmax())] == row["label"]
    assert right != len(OWN) / 2  # which the other order would give as well
    for labels in ((), ("rose", "fell"), ("fell", "rose")):
        found = evaluate_model(str(tmp_path / "run"), EvaluateConfig(tasks=(dev,), labels=labels))
        assert found["accuracy"][dev] == right / len(OWN)


def test_a_classifier_keeps_the_order_of_its_labels(tmp_path: Path) -> None:
    """Training continues with the outputs that the labels had; evaluation on others is refused."""
    words, dev = write_words(tmp_path / "words"), str(write_jsonl(tmp_path / "dev.jsonl", OWN))
    names = {"raw": {"id2label": {"1": "fell", "0": "rose"}}, "head": "sequence_classification"}
    Bert.from_config(MODELS["bert"].replace(**names), seed=0).save_pretrained(tmp_path / "model")
    config = task_config("bert-superglue", "BoolQ", Path("x"), words, tmp_path / "run", 1)
    config.init_from = str(tmp_path / "model")
    config.data = dataclasses.replace(
        config.data, task=None, labels=("fell", "rose"), paths=(dev,), validation=(dev,)
    )
    run_task("bert-superglue", config)
    told = json.loads((tmp_path / "run" / "export" / "config.json").read_text())
    assert told["id2label"] == {"0": "rose", "1": "fell"}
    told["id2label"] = {"0": "True", "1": "False"}
    (tmp_path / "run" / "export" / "config.json").write_text(json.dumps(told))
    write_boolq(tmp_path / "BoolQ")
    asked = EvaluateConfig(tasks=("BoolQ",), task_data=str(tmp_path / "BoolQ"))
    with pytest.raises(ConfigError, match=r"are True, False, but BoolQ has .* false, true"):
        evaluate_model(str(tmp_path / "run"), asked)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"labels": ()}, "data.task is not set"),
        ({"task": "BoolQ"}, "define a custom task"),
        ({"labels": ("rose",)}, "must contain at least two"),
        ({"labels": ("rose", "west")}, "label='fell' is not a label"),
        ({"fields": ("topic",)}, "the field 'topic' is missing"),
        ({"fields": ("label",)}, "cannot be used"),
    ],
)
def test_what_is_wrong_with_a_task_of_ones_own(
    changes: dict[str, Any], text: str, tmp_path: Path
) -> None:
    from bmforge.errors import BmforgeError
    from bmforge.recipes.inputs.task_data import TaskDataConfig, read_examples

    file = str(write_jsonl(tmp_path / "own.jsonl", OWN))
    data = TaskDataConfig(labels=("fell", "rose"), paths=(file,))
    _, examples, _ = read_examples(data)
    assert [(dict(e.fields), e.label) for e in examples] == [
        ({"text": row["text"]}, ("fell", "rose").index(str(row["label"]))) for row in OWN
    ]
    with pytest.raises(BmforgeError, match=text):
        read_examples(dataclasses.replace(data, **changes))


def test_what_cannot_be_evaluated(subject: Path, tmp_path: Path) -> None:
    Bert.from_config(MODELS["bert"]).save_pretrained(tmp_path / "bert")
    file = str(subject / "texts.jsonl")
    model, bert = str(subject / "model"), str(tmp_path / "bert")
    for name, config, text in (
        (model, EvaluateConfig(), "there is no evaluation data"),
        (model, EvaluateConfig(text=(file,), labels=("a", "b")), "labels has no effect"),
        (model, EvaluateConfig(text=(file,), seq_len=25), "more than the model's 24 positions"),
        (model, EvaluateConfig(tasks=("BoolQ",)), "data of BoolQ is not set"),
        (model, EvaluateConfig(tasks=("Boolk",), task_data="x"), "Did you mean 'BoolQ'"),
        (bert, EvaluateConfig(text=(file,)), "has no tokenizer"),
        (bert, EvaluateConfig(prepared=(str(subject / "tokens"),)), "next tokens"),
    ):
        with pytest.raises(ConfigError, match=text):
            evaluate_model(name, config)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="is a pipe or a device"):
        evaluate_model(model, EvaluateConfig(tasks=(str(tmp_path / "pipe"),)))

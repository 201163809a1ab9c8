"""Runs that read chosen documents, and weigh parts of one corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import write_jsonl

from bmforge.cli import main
from bmforge.data import END_OF_TEXT, PrepareConfig, load_tokenizer, prepare
from bmforge.errors import ConfigError, DataError
from bmforge.parallel import World
from bmforge.recipes.inputs.corpus import CorpusConfig, open_corpus

ENGLISH, CHINESE = "the mill stood at the river ", "磨坊在河边日夜转动。"


@pytest.fixture(scope="module", params=[True, False], ids=["joined", "shards"])
def corpus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("selection")
    rows: list[dict[str, Any]] = [
        {"text": (CHINESE, ENGLISH)[n % 2] * (3 + n % 3) + str(n), "language": ("zh", "en")[n % 2]}
        for n in range(40)
    ]
    write_jsonl(root / "texts.jsonl", rows)
    config = PrepareConfig(vocab_size=300, shard_bytes=1500, join_stores=request.param)
    prepare(root / "texts.jsonl", root / "corpus", config)
    return root / "corpus"


def shares(corpus: Path, config: CorpusConfig, steps: int = 20) -> float:
    """Return which share of the tokens is of Chinese text."""
    opened = open_corpus(config, 300, World(0, 1, torch.device("cpu")))
    tokenizer = load_tokenizer(corpus / "tokenizer")
    chinese = total = 0
    with opened.loader as loader:
        for _ in range(steps):
            for batch in next(loader):
                for row in batch["input_ids"].tolist():
                    text = tokenizer.decode(row).replace(END_OF_TEXT, "")
                    chinese += sum("一" <= c <= "鿿" for c in text)
                    total += sum("a" <= c <= "z" or "一" <= c <= "鿿" for c in text)
    return chinese / total


def config(*paths: str, **changes: Any) -> CorpusConfig:
    sizes = {"seq_len": 8, "global_batch_size": 4, "micro_batch_size": 4, "prefetch_steps": 0}
    return CorpusConfig(paths=paths, **{**sizes, **changes})


def test_a_run_reads_what_fits(corpus: Path) -> None:
    assert shares(corpus, config(str(corpus), where=("language=zh",))) == 1.0
    assert shares(corpus, config(f"{corpus}?language=en")) == 0.0
    assert 0 < shares(corpus, config(str(corpus))) < 1


def test_parts_of_a_corpus_are_weighed(corpus: Path) -> None:
    paths = (f"{corpus}?language=zh", f"{corpus}?language=en")
    opened = open_corpus(config(*paths, weights=(3, 1)), 300, World(0, 1, torch.device("cpu")))
    numbers = np.arange(400)
    dataset = opened.loader._maker.dataset
    sources, _ = dataset.source_of(numbers)
    assert abs((sources == 0).mean() - 0.75) < 0.01
    assert opened.validation_text_bytes is not None
    rows = dataset.training_rows(numbers, 0)
    tokenizer = load_tokenizer(corpus / "tokenizer")
    for source, row in zip(sources[:40].tolist(), rows[:40].tolist(), strict=True):
        text = tokenizer.decode(row)
        assert any("一" <= c <= "鿿" for c in text) == (source == 0)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"where": ("langage=zh",)}, ConfigError, "Did you mean"),
        ({"where": ("language=fr",)}, DataError, "no document"),
        ({"where": ("language=zh",), "split": (9.0, 1.0)}, ConfigError, "Leave one of them out"),
    ],
)
def test_what_does_not_fit_is_said(
    corpus: Path, changes: dict, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        open_corpus(config(str(corpus), **changes), 300, World(0, 1, torch.device("cpu")))


def test_the_command_line_takes_conditions(corpus: Path, tmp_path: Path) -> None:
    options = [
        *(
            "train",
            "pretrain",
            "--model",
            "gpt2",
            "--model.hidden-size",
            "16",
            "--train.steps",
            "1",
        ),
        *("--model.num-layers", "1", "--model.num-heads", "2", "--model.max-seq-len", "16"),
        *("--model.vocab-size", "300", "--data.seq-len", "8", "--data.global-batch-size", "2"),
        *("--data.micro-batch-size", "2", "--run-dir", str(tmp_path / "run")),
        *("--data.paths", str(corpus), "--data.where", "language=zh", "date!=2020"),
    ]
    assert main(options) == 0
    assert 'where = [\n    "language=zh",\n    "date!=2020",\n]' in (
        tmp_path / "run" / "run.toml"
    ).read_text("utf-8")

"""CPM-Bee's recipe: learned, evaluated, stopped and gone on with, exported, filled by command."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_runs import SIZES, bee_tokenizer, settings, write_jsonl

from bmforge.cli.main import main
from bmforge.errors import BmforgeError
from bmforge.infer.openbmb.documents import fill_documents
from bmforge.models import AutoModel
from bmforge.models.cpm_bee import CPMBeeConfig, to_arguments
from bmforge.parallel import World
from bmforge.recipes.documents import (
    CPMBeeTrainConfig,
    DocumentConfig,
    _held_out_batches,
    train_documents,
)
from bmforge.testing import assert_equal_trees
from bmforge.tokenizers.cpm_bee.batch import build_instance, collate_rows
from bmforge.train import read_metrics

NEXT = dict(zip("abcdefgh", "bcdefgha", strict=True))
BLANKS = [{"input": f"{a}<mask_0>", "<ans>": {"<mask_0>": b}} for a, b in NEXT.items()]
RECORDS = [{"text": f"x{a}", "label": "1" if a in "aceg" else "2"} for a in NEXT]
RATING = {"input": "$text", "question": "? (1-2)", "<ans>": "$label"}


@pytest.fixture
def data(tmp_path: Path) -> DocumentConfig:
    """Two tasks, one of them by a transform."""
    bee_tokenizer().save_pretrained(tmp_path / "tokenizer")
    write_jsonl(tmp_path / "blanks.jsonl", BLANKS)
    write_jsonl(tmp_path / "records.jsonl", RECORDS)
    mixture = [
        {"task_name": "blanks", "path": "blanks.jsonl", "weight": 2},
        {"task_name": "rating", "path": "records.jsonl", "transforms": [RATING]},
    ]
    (tmp_path / "mixture.json").write_text(json.dumps(mixture))
    path = str(tmp_path / "mixture.json")
    return DocumentConfig(
        paths=(path,), validation=(path,), tokenizer=str(tmp_path / "tokenizer"), seq_len=64,
        global_batch_size=4, micro_batch_size=2,
    )  # fmt: skip


def config(folder: Path, data: DocumentConfig, steps: int, **changes: Any) -> CPMBeeTrainConfig:
    """A tiny run."""
    model = CPMBeeConfig(
        vocab_size=len(bee_tokenizer()), intermediate_size=48, head_dim=16, num_buckets=16,
        num_relations=64, max_seq_len=32, **SIZES,
    )  # fmt: skip
    return CPMBeeTrainConfig(
        run_dir=folder, model=model, data=data, train=settings(steps, 0.03), **changes
    )


def test_learns_and_fills_through_the_command_line(
    tmp_path: Path, data: DocumentConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train_documents(config(tmp_path / "run", data, 90))
    losses = [row["loss"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert losses[-1] < 0.2 * losses[0]
    told = json.loads((tmp_path / "run" / "results.json").read_text())["validation loss"]
    assert set(told) == {"model", "blanks", "rating"}
    assert result.evaluation is not None
    assert told["model"] == pytest.approx(result.evaluation.loss)
    export = tmp_path / "run" / "export"
    questions = [{**d, "<ans>": {"<mask_0>": ""}} for d in BLANKS]
    file = write_jsonl(tmp_path / "questions.jsonl", questions)
    capsys.readouterr()
    words = ["--document", str(file), "--max-new-tokens", "3"]
    assert main(["generate", str(export), *words]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    model = AutoModel.from_pretrained(export)
    assert printed == fill_documents(model, bee_tokenizer(), questions, max_new_tokens=3)  # type: ignore[arg-type]
    right = sum(a["<ans>"] == b["<ans>"] for a, b in zip(printed, BLANKS, strict=True))
    assert right >= 6


def test_the_loss_is_that_of_every_document_alone(tmp_path: Path, data: DocumentConfig) -> None:
    """Packing, batches and the means over them change nothing: summed by hand from logits."""
    result = train_documents(config(tmp_path / "run", data, 1))
    model = result.model.eval()
    total, count = 0.0, 0
    ratings = [{**RATING, "input": r["text"], "<ans>": r["label"]} for r in RECORDS]
    for document in [*BLANKS, *ratings]:
        row = collate_rows([[build_instance(document, bee_tokenizer())]], bee_tokenizer())
        inputs = to_arguments(row.inputs)
        labels = inputs.pop("labels").flatten()
        with torch.no_grad():
            logits = model(**inputs).logits.flatten(0, 1)
        total += F.cross_entropy(logits, labels, reduction="sum").item()
        count += int((labels != -100).sum())
    assert result.evaluation is not None
    assert result.evaluation.tokens == count
    assert result.evaluation.loss == pytest.approx(total / count, rel=1e-5)


def test_goes_on_where_it_stopped(tmp_path: Path, data: DocumentConfig) -> None:
    whole = train_documents(config(tmp_path / "whole", data, 5)).model.state_dict()
    train_documents(config(tmp_path / "run", data, 2))
    rest = train_documents(config(tmp_path / "run", data, 5))
    assert rest.step == 5
    assert_equal_trees(rest.model.state_dict(), whole)


def test_starts_from_a_model(tmp_path: Path, data: DocumentConfig) -> None:
    """The sizes are the model's own, what is set beside it is kept, and the tokenizer is found."""
    first = train_documents(config(tmp_path / "first", data, 2))
    export = str(tmp_path / "first" / "export")
    plain = CPMBeeTrainConfig(
        run_dir=tmp_path / "second",
        init_from=export,
        data=replace(data, tokenizer=None),
        train=settings(1, lr=1e-7),
    )
    plain.model.dropout = 0.25
    second = train_documents(plain)
    assert second.model.config.hidden_size == 32
    assert second.model.config.dropout == 0.25
    assert first.evaluation is not None
    assert second.evaluation is not None
    assert second.evaluation.loss == pytest.approx(first.evaluation.loss, rel=1e-3)
    train_documents(replace(plain, train=settings(2, lr=1e-7)))  # the same run goes on


def test_ranks_share_the_held_out_documents(data: DocumentConfig) -> None:
    """Equally many batches on every rank, and each label on one of them."""
    counts = []
    for world in (1, 2, 3):
        shares = [
            list(
                _held_out_batches(
                    BLANKS,
                    bee_tokenizer(),
                    replace(data, seq_len=24),
                    World(r, world, None),  # type: ignore[arg-type]
                )
            )
            for r in range(world)
        ]
        assert len({len(share) for share in shares}) == 1
        counts.append(sum(int((b["labels"] != -100).sum()) for share in shares for b in share))
    assert counts == [2 * len(BLANKS)] * 3


def test_bad_settings_are_told(tmp_path: Path, data: DocumentConfig) -> None:
    bad = write_jsonl(tmp_path / "bad.jsonl", [BLANKS[0], {"input": "no answer"}])
    cases: list[tuple[dict[str, Any], str]] = [
        ({"paths": ()}, "data.paths is empty"),
        ({"tokenizer": None}, "data.tokenizer is not set"),
        ({"paths": (str(tmp_path / "nothing.jsonl"),)}, "nothing.jsonl"),
        ({"validation": (str(bad),)}, r"bad\.jsonl, line 2: .*<ans>"),
        ({"seq_len": 5, "validation": (str(bad),)}, "no validation document of task 'bad'|line 2"),
        ({"global_batch_size": 3}, "global_batch_size=3"),
    ]
    for number, (changes, message) in enumerate(cases):
        with pytest.raises(BmforgeError, match=message):
            train_documents(config(tmp_path / f"run{number}", replace(data, **changes), 1))
    other = config(tmp_path / "other", data, 1)
    other.model = replace(other.model, vocab_size=99)
    with pytest.raises(BmforgeError, match=r"--model\.vocab-size 53"):
        train_documents(other)
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(BmforgeError, match="is not a CPMBee"):
        train_documents(config(tmp_path / "gpt", data, 1, init_from=str(tmp_path / "gpt2")))


def test_what_is_left_out_is_counted_by_reason(
    tmp_path: Path, data: DocumentConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """More than a tenth is a warning before the run; all of it is told at the end."""
    good = [{"input": f"x{n}", "<ans>": "y"} for n in range(12)]
    long = [{"input": "a" * 70, "<ans>": ""}]
    unspelled = [{"input": "a", "<ans>": "\u7d93"}, {"input": "b", "<ans>": "\u6fdf"}]
    file = write_jsonl(tmp_path / "some.jsonl", [*good, *long, *unspelled, {"input": "c"}])
    given = replace(data, paths=(str(file),), validation=(), skip_bad=True)
    logging.getLogger("bmforge").addHandler(caplog.handler)
    try:
        train_documents(config(tmp_path / "run", given, 4))
    finally:
        logging.getLogger("bmforge").removeHandler(caplog.handler)
    told = [r for r in caplog.records if "were left out" in r.getMessage()]
    assert [record.levelname for record in told] == ["WARNING", "WARNING"]
    first, last = (record.getMessage() for record in told)
    counts = "2 with an answer that the vocabulary cannot encode, 1 "
    assert first.startswith(f"4 of 16 samples read before the run were left out: {counts}")
    for words in ("1 longer than the window", "1 not a valid document", "some.jsonl, line 13"):
        assert words in first
    found = re.match(r"(\d+) of (\d+) samples were left out: (\d+) with", last)
    assert found is not None
    left_out, total, answers = map(int, found.groups())
    assert left_out / total == pytest.approx(4 / 16, abs=0.1)
    assert answers / left_out == pytest.approx(1 / 2, abs=0.2)


def test_little_that_is_left_out_is_told_once(
    tmp_path: Path, data: DocumentConfig, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"input": f"x{n}", "<ans>": "y"} for n in range(30)]
    file = write_jsonl(tmp_path / "some.jsonl", [*rows, {"input": "a" * 70, "<ans>": ""}])
    given = replace(data, paths=(str(file),), validation=())
    logging.getLogger("bmforge").addHandler(caplog.handler)
    try:
        train_documents(config(tmp_path / "run", given, 9))
    finally:
        logging.getLogger("bmforge").removeHandler(caplog.handler)
    told = [r for r in caplog.records if "were left out" in r.getMessage()]
    assert [record.levelname for record in told] == ["INFO"]
    assert "longer than the window; for instance" in told[0].getMessage()

"""Test examples in `prepare`: planted ones are dropped or cut out, and none else."""

from __future__ import annotations

import gzip
import json
import lzma
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bmforge.data import PrepareConfig, prepare, show_preparation
from bmforge.data.prepare.documents import read_shard
from bmforge.data.prepare.examples import read_examples
from bmforge.errors import ConfigError, DataError

CONFIG = PrepareConfig(
    vocab_size=300, validation_fraction=0.0, shard_bytes=900, keep_stages=True, keep_dropped=True
)
QUESTION = "Which of the two bridges over the river was opened first, the old or the new one?"
CHINESE = "秦川雄帝宅函谷壮皇居绮殿千寻起离宫百雉余连甍遥接汉飞观迥凌虚云日隐层阙"
SHORT = "Who knows?"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Ten texts, of which two hold an example, and a test set."""
    texts = [f"Text number {n} is about mills, and about nothing that is asked." for n in range(8)]
    texts[3] += f" {QUESTION.upper()} Nobody said."
    texts += [f"开头。{CHINESE}。结尾。", f"They asked: {SHORT}"]
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "texts.jsonl").write_text("".join(lines))
    rows = [{"a": {"question": QUESTION}, "b": [SHORT]}, {"poem": CHINESE, "label": 3}]
    (tmp_path / "exam.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def left(out: Path) -> list[str]:
    folder = out / "preparing.tmp" / "stages" / "documents"
    count = len([*folder.glob("*.digests")])
    return [document.text for number in range(count) for document in read_shard(folder, number)]


@pytest.mark.parametrize("workers", [0, 1])
def test_planted_examples_are_dropped(place: Path, workers: int) -> None:
    config = replace(CONFIG, decontaminate=(str(place / "exam.jsonl"),), workers=workers)
    report = prepare(place / "texts.jsonl", place / "out", config)
    assert report.documents == 8
    lines = [json.loads(line) for line in (place / "out" / "dropped.jsonl").open(encoding="utf-8")]
    assert {(line["place"], line["value"]) for line in lines} == {
        ("4", "exam:1.a.question"),
        ("9", "exam:2.poem"),
    }
    assert any(QUESTION.upper().rstrip("?") in line["excerpt"] for line in lines)


def test_planted_examples_are_cut_out(place: Path) -> None:
    plain = prepare(place / "texts.jsonl", place / "plain", CONFIG)
    config = replace(CONFIG, decontaminate=(str(place / "exam.jsonl"),), cut_examples=True)
    report = prepare(place / "texts.jsonl", place / "out", config)
    assert report.documents == plain.documents == 10
    before, after = left(place / "plain"), left(place / "out")
    assert [n for n, text in enumerate(before) if text != after[n]] == [3, 8]
    assert QUESTION.upper().rstrip("?") not in after[3]
    assert "Text number 3" in after[3]
    assert "Nobody said." in after[3]
    assert CHINESE not in after[8]


def test_a_test_set_may_have_any_format_of_records(place: Path) -> None:
    """The index of each file is the one of the .jsonl file with the same rows."""
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    raw = (place / "exam.jsonl").read_bytes()
    rows = [json.loads(line) for line in raw.splitlines()]
    fields = {name: None for row in rows for name in row}
    written = {
        "exam.jsonl.gz": gzip.compress(raw),
        "exam.jsonl.xz": lzma.compress(raw),
        "exam.json": json.dumps(rows).encode("utf-16"),
        "exam.ndjson": raw.decode("unicode-escape").encode("gb18030"),
    }
    for name, content in written.items():
        (place / name).write_bytes(content)
    parquet.write_table(
        arrow.Table.from_pylist([fields | row for row in rows]), place / "exam.parquet"
    )
    expected = list(read_examples((str(place / "exam.jsonl"),)))
    assert [name for name, _ in expected] == ["exam:1.a.question", "exam:1.b.0", "exam:2.poem"]
    for name in (*written, "exam.parquet"):
        assert list(read_examples((str(place / name),))) == expected


def test_a_task_of_a_benchmark(place: Path) -> None:
    folder = place / "superglue" / "BoolQ"
    folder.mkdir(parents=True)
    row: dict[str, Any] = {
        "passage": f"A passage. {QUESTION}",
        "question": "is it so",
        "label": True,
    }
    (folder / "val.jsonl").write_text(json.dumps({**row, "idx": 0}) + "\n")
    config = replace(CONFIG, decontaminate=(f"BoolQ={place / 'superglue'}",))
    assert prepare(place / "texts.jsonl", place / "out", config).documents == 9


def test_a_changed_set_redoes_the_first_stage(place: Path) -> None:
    config = replace(CONFIG, decontaminate=(str(place / "exam.jsonl"),))
    prepare(place / "texts.jsonl", place / "out", config)

    def to_do() -> list[str]:
        states = show_preparation(place / "texts.jsonl", place / "out", config)
        return [state.stage for state in states if state.done < state.parts]

    assert to_do() == []
    with (place / "exam.jsonl").open("a") as file:
        file.write(json.dumps("one more example that has eight words or so") + "\n")
    assert to_do()[0] == "documents"


@pytest.mark.parametrize(
    ("sets", "error", "said"),
    [
        (("nothing.jsonl",), ConfigError, "is not a file"),
        (("BoolQQ=folder",), ConfigError, "Did you mean 'BoolQ'"),
        (("BoolQ=folder",), DataError, "no split of task BoolQ"),
        (("short.jsonl",), ConfigError, "long enough"),
        (("set.zip",), DataError, "set.zip' is not a file of records"),
        (("set.csv",), DataError, "row 2 has 1 values, but the header has 2"),
    ],
)
def test_sets_that_say_nothing_are_refused(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    sets: tuple[str, ...],
    error: type[Exception],
    said: str,
) -> None:
    monkeypatch.chdir(place)
    (place / "short.jsonl").write_text(json.dumps(SHORT))
    (place / "set.csv").write_text("question,answer\none value\n")
    with zipfile.ZipFile(place / "set.zip", "w") as archive:
        archive.write("exam.jsonl")
    with pytest.raises(error, match=said):
        prepare("texts.jsonl", "out", replace(CONFIG, decontaminate=sets))
    with pytest.raises(ConfigError, match="no effect"):
        prepare("texts.jsonl", "out", replace(CONFIG, cut_examples=True))
    assert not (place / "out").exists()

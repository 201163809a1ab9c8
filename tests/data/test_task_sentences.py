"""Tables and lines of sentences with classes, in the form of their benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bmforge.data.tasks import TASKS, read_task
from bmforge.errors import DataError


def put(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "row", "texts", "label"),
    [
        ("dbpedia", '14,"A","say ""x"""', {"title": "A", "content": 'say "x"'}, "WrittenWork"),
        ("yahoo_answers", "6,why,how,so", {"title": "why", "question": "how", "answer": "so"},
         "Sports"),
        ("amazon_polarity", "2,good,it is", {"title": "good", "text": "it is"}, "positive"),
    ],
)  # fmt: skip
def test_tables_with_classes_from_one(name, row, texts, label, tmp_path):
    put(tmp_path / name, "test.csv", row + "\n")
    (found,) = read_task(name, tmp_path, "test")
    assert found.fields == texts
    assert TASKS[name].label_names[found.label] == label
    put(tmp_path / name, "train.csv", "0" + row[row.index(",") :] + "\n")
    with pytest.raises(DataError, match=r"line 1.*is not a class from 1"):
        read_task(name, tmp_path, "train")


def test_tables_with_a_head(tmp_path):
    put(tmp_path / "SST-2", "dev.tsv", "sentence\tlabel\na film\t1\nso bad\t0\n")
    assert [(e.fields["sentence"], e.label) for e in read_task("SST-2", tmp_path, "dev")] == [
        ("a film", 1),
        ("so bad", 0),
    ]
    put(tmp_path / "SST-2", "test.tsv", "index\tsentence\n0\ta film\n")
    assert read_task("SST-2", tmp_path, "test")[0].label is None
    put(tmp_path / "ChnSentiCorp", "dev.tsv", "qid\tlabel\ttext_a\n0\t1\t很好\n")
    (found,) = read_task("ChnSentiCorp", tmp_path, "dev")
    assert (found.fields, found.label) == ({"text_a": "很好"}, 1)
    for text, said in (
        ("a\tb\n", "no column 'sentence'"),
        ("sentence\tlabel\na\n", "1 cells, but the header has 2"),
        ("sentence\tlabel\na\t7\n", "label='7' must be an integer from 0 to 1"),
    ):
        put(tmp_path / "SST-2", "train.tsv", text)
        with pytest.raises(DataError, match=said):
            read_task("SST-2", tmp_path, "train")


@pytest.mark.parametrize(
    ("name", "file"),
    [("MNLI", "multinli_1.0_dev_matched.jsonl"), ("SNLI", "snli_1.0_dev.jsonl")],
)
def test_pairs_without_an_agreed_label_are_left_out(name, file, tmp_path):
    rows = [
        {"sentence1": "a", "sentence2": "b", "gold_label": "neutral", "pairID": "1n"},
        {"sentence1": "a", "sentence2": "c", "gold_label": "-", "pairID": "2n"},
    ]
    put(tmp_path / name, file, "\n".join(map(json.dumps, rows)))
    (found,) = read_task(name, tmp_path, "dev")
    assert (found.fields["sentence2"], found.label, found.idx) == ("b", 1, "1n")


def test_relations_of_spans(tmp_path):
    row = {
        "id": "x", "relation": "per:title", "token": ["Ann", "is", "a", "head", "cook", "."],
        "subj_start": 0, "subj_end": 0, "obj_start": 3, "obj_end": 4, "subj_type": "PERSON",
        "obj_type": "TITLE",
    }  # fmt: skip
    put(tmp_path / "TACRED", "train.json", json.dumps([row]))
    (found,) = read_task("TACRED", tmp_path, "train")
    assert found.fields["obj_text"] == "head cook"
    assert TASKS["TACRED"].label_names[found.label] == "per:title"
    assert len(TASKS["TACRED"].label_names) == 42
    put(tmp_path / "TACRED", "dev.json", "{}")
    with pytest.raises(DataError, match="contains a JSON dict"):
        read_task("TACRED", tmp_path, "dev")

"""Files of the published tasks, in the form of their benchmarks, read back example by example."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bmforge.data.tasks import TASKS, TaskExample, read_task
from bmforge.errors import ConfigError, DataError

SIZES = {"train": 32, "dev": 32, "test": 610}  # of the real reviews
REAL = Path(__file__).resolve().parents[3] / "shared" / "data"


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def put(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


TARGET = {"span1_index": 0, "span1_text": "Mark", "span2_index": 4, "span2_text": "He"}
# name -> (the file's name, an entry as it is published, the example it makes)
ENTRIES: dict[str, tuple[str, Any, TaskExample]] = {
    "BoolQ": (
        "val.jsonl",
        {"question": "is it", "passage": "It is.", "idx": 3, "label": True},
        TaskExample({"passage": "It is.", "question": "is it"}, 1, 3),
    ),
    "CB": (
        "val.jsonl",
        {"premise": "p", "hypothesis": "h", "label": "neutral", "idx": 0},
        TaskExample({"premise": "p", "hypothesis": "h"}, 2, 0),
    ),
    "COPA": (
        "val.jsonl",
        {
            **{"premise": "p", "choice1": "a", "choice2": "b"},
            **{"question": "effect", "label": 1, "idx": 7},
        },
        TaskExample({"premise": "p", "question": "effect"}, 1, 7, ("a", "b")),
    ),
    "RTE": (
        "val.jsonl",
        {"premise": "p", "hypothesis": "h", "label": "not_entailment", "idx": 0},
        TaskExample({"premise": "p", "hypothesis": "h"}, 0, 0),
    ),
    "WiC": (
        "val.jsonl",
        {"word": "bed", "sentence1": "a", "sentence2": "b", "idx": 1, "label": False, "start1": 0},
        TaskExample({"sentence1": "a", "sentence2": "b", "word": "bed"}, 0, 1),
    ),
    "WSC": (
        "val.jsonl",
        {"text": "Mark said He", "target": TARGET, "idx": 2, "label": True},
        TaskExample(
            {
                **{"text": "Mark said He", "span1_text": "Mark", "span2_text": "He"},
                **{"span1_index": "0", "span2_index": "4"},
            },
            1,
            2,
        ),
    ),
    "eprstmt": (
        "dev_0.json",
        {"id": 4, "sentence": "好", "label": "Positive"},
        TaskExample({"sentence": "好"}, 1, 4),
    ),
    "csl": (
        "dev.json",
        {"id": 1, "abst": "摘要", "keyword": ["甲", "乙"], "label": "1"},
        TaskExample({"abst": "摘要", "keyword": "甲；乙"}, 1, 1),
    ),
    "ocnli": (
        "dev.json",
        {"sentence1": "一", "sentence2": "二", "label": "neutral", "label0": "neutral", "id": 3},
        TaskExample({"sentence1": "一", "sentence2": "二"}, 2, 3),
    ),
    "afqmc": (
        "dev.json",
        {"sentence1": "一", "sentence2": "二", "label": "0"},
        TaskExample({"sentence1": "一", "sentence2": "二"}, 0, 0),
    ),
    "tnews": (
        "dev.json",
        {"label": "106", "label_desc": "news_house", "sentence": "楼", "keywords": ""},
        TaskExample({"sentence": "楼"}, 5, 0),
    ),
    "iflytek": (
        "dev.json",
        {"label": "118", "label_des": "其他", "sentence": "app"},
        TaskExample({"sentence": "app"}, 118, 0),
    ),
    "cluewsc2020": (
        "dev.json",
        {"target": TARGET, "idx": 9, "label": "false", "text": "t"},
        TaskExample(
            {
                **{"text": "t", "span1_text": "Mark", "span1_index": "0"},
                **{"span2_text": "He", "span2_index": "4"},
            },
            0,
            9,
        ),
    ),
    "chid": (
        "dev_0.json",
        {"id": 6, "candidates": ["甲", "乙"], "content": "x #idiom# y", "answer": 1},
        TaskExample({"content": "x #idiom# y"}, 1, 6, ("甲", "乙")),
    ),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_as_it_is_published(name: str, tmp_path: Path) -> None:
    """In the task's own folder and in the one above; without its label it is a secret one."""
    file, entry, wanted = ENTRIES[name]
    put(tmp_path / name, file, lines(entry))
    assert read_task(name, tmp_path, "dev") == [wanted]
    assert read_task(name, tmp_path / name, "val") == [wanted]
    hidden = {key: value for key, value in entry.items() if key not in ("label", "answer")}
    put(tmp_path / name, file, lines(hidden))
    (secret,) = read_task(name, tmp_path, "dev")
    assert secret.label is None
    assert (secret.fields, secret.choices) == (wanted.fields, wanted.choices)


def test_multirc_has_an_example_for_every_answer(tmp_path: Path) -> None:
    def question(idx: int, *labels: int) -> dict[str, Any]:
        answers = [{"text": f"a{n}", "idx": n, "label": label} for n, label in enumerate(labels)]
        return {"question": f"q{idx}", "answers": answers, "idx": idx}

    row = {"idx": 5, "passage": {"text": "t", "questions": [question(0, 1, 0), question(1, 1)]}}
    put(tmp_path, "train.jsonl", lines(row))
    found = read_task("MultiRC", tmp_path, "train")
    assert [(e.idx, e.label) for e in found] == [((5, 0, 0), 1), ((5, 0, 1), 0), ((5, 1, 0), 1)]
    assert found[2].fields == {"passage": "t", "question": "q1", "answer": "a0"}


def test_record_names_each_entity_once(tmp_path: Path) -> None:
    text = "Rome and Bonn, then Rome"
    spans = [{"start": 20, "end": 23}, {"start": 9, "end": 12}, {"start": 0, "end": 3}]
    answers = [{"start": 9, "end": 12, "text": "Bonn"}]
    row = {
        **{"source": "x", "idx": 2, "passage": {"text": text, "entities": spans}},
        "qas": [{"query": "@placeholder it is", "answers": answers, "idx": 8}],
    }
    put(tmp_path, "train.jsonl", lines(row))
    (found,) = read_task("ReCoRD", tmp_path, "train")
    assert (found.choices, found.answers, found.label) == (("Rome", "Bonn"), ("Bonn",), "Bonn")
    assert found.idx == (2, 8)
    row["passage"]["entities"] = [{"start": 0, "end": 99}]
    put(tmp_path, "train.jsonl", lines(row))
    with pytest.raises(DataError, match=r"passage, entities 0: the span from 0 to 100"):
        read_task("ReCoRD", tmp_path, "train")


def test_squad_keeps_every_accepted_answer(tmp_path: Path) -> None:
    right = [{"text": "Rome", "answer_start": 0}, {"text": "in Rome", "answer_start": 0}]
    question = {"question": "where", "id": "56be", "answers": right}
    data = {"version": "1.1", "data": [{"title": "t", "paragraphs": []}]}
    data["data"][0]["paragraphs"] = [{"context": "c", "qas": [question]}]  # type: ignore[index]
    put(tmp_path, "dev-v1.1.json", json.dumps(data))
    (found,) = read_task("SQuAD", tmp_path, "dev")
    assert found == TaskExample(
        {"context": "c", "question": "where"}, "Rome", "56be", answers=("Rome", "in Rome")
    )
    put(tmp_path, "dev-v1.1.json", json.dumps({"data": [{"title": "t"}]}))
    with pytest.raises(DataError, match="data 0: the field 'paragraphs' is missing"):
        read_task("SQuAD", tmp_path, "dev")


def test_clues_idioms_have_their_answers_beside(tmp_path: Path) -> None:
    row = {"content": ["a #idiom000001# b #idiom000002#"], "candidates": ["甲", "乙"]}
    put(tmp_path, "dev.json", lines(row))
    answers = {"#idiom000001#": 1, "#idiom000002#": 0}
    put(tmp_path, "dev_answer.json", json.dumps(answers))
    found = read_task("chid", tmp_path, "dev")
    assert {e.fields["blank"]: e.label for e in found} == answers
    put(tmp_path, "dev_answer.json", json.dumps({"#idiom000001#": 5}))
    with pytest.raises(DataError, match="not the index of a candidate"):
        read_task("chid", tmp_path, "dev")


def test_c3_chooses_among_its_answers(tmp_path: Path) -> None:
    questions = [{"question": "q", "choice": ["x", "y"], "answer": "y"}]
    put(tmp_path, "m-train.json", json.dumps([[["s1", "s2"], questions, "7-1"]]))
    (found,) = read_task("c3-m", tmp_path, "train")
    assert found == TaskExample({"context": "s1\ns2", "question": "q"}, 1, "7-1", ("x", "y"))


def test_tables(tmp_path: Path) -> None:
    """LCQMC's quotation marks are characters, AG News' are around cells."""
    put(tmp_path / "LCQMC", "dev.tsv", 'text_a\ttext_b\tlabel\n"一\t二"\t1\n三\t四\t0\n')
    found = read_task("LCQMC", tmp_path, "dev")
    assert [(e.fields["text_a"], e.label) for e in found] == [('"一', 1), ("三", 0)]
    put(tmp_path / "ag_news", "test.csv", '"3","A, B","say ""x"""\n')
    (news,) = read_task("ag_news", tmp_path, "test")
    assert (news.fields, news.label) == ({"title": "A, B", "text": 'say "x"'}, 2)
    put(tmp_path / "LCQMC", "dev.tsv", "一\t二\t1\n三\t四\n五 六\n")
    with pytest.raises(DataError, match=r"dev.tsv', line 3"):
        read_task("LCQMC", tmp_path, "dev")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{}\nnot json\n", r"line 1: the field 'passage' is missing \(fields: none\)"),
        ('{"passage": "p", "question": "q", "idx": 1, "label": true}\n[', "line 2"),
        ("[1]\n", "line 1: .* is not a JSON object"),
        ('{"passage": 7, "question": "q", "idx": 1}', "'passage'|passage=7 is a int"),
        (lines({"passage": "p", "question": "q", "idx": 0, "label": "x"}), "label='x' is not"),
    ],
)
def test_bad_lines_are_named(text: str, told: str, tmp_path: Path) -> None:
    path = put(tmp_path, "train.jsonl", text)
    with pytest.raises(DataError, match=told) as failure:
        read_task("BoolQ", tmp_path, "train")
    assert str(path) in str(failure.value)


def test_line_breaks_inside_texts_are_characters(tmp_path: Path) -> None:
    """JSON may hold U+2028 as it is; it ends no line."""
    row = {"passage": "a\u2028b", "question": "q", "idx": 0, "label": False}
    put(tmp_path, "train.jsonl", lines(row))
    assert read_task("BoolQ", tmp_path, "train")[0].fields["passage"] == "a\u2028b"


def test_unknown_names_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'BoolQ'"):
        read_task("Boolq", tmp_path, "dev")
    with pytest.raises(ConfigError, match="no split 'all'"):
        read_task("BoolQ", tmp_path, "all")
    with pytest.raises(DataError, match=r"val\.jsonl"):
        read_task("BoolQ", tmp_path, "dev")


def test_no_agreement_is_no_example(tmp_path: Path) -> None:
    rows = [{"sentence1": "a", "sentence2": "b", "label": label} for label in ("-", "entailment")]
    put(tmp_path, "train.json", lines(*rows))
    assert [e.label for e in read_task("cmnli", tmp_path, "train")] == [1]


def test_all_of_the_named_benchmarks_are_there() -> None:
    wanted = """BoolQ CB COPA RTE WiC WSC MultiRC ReCoRD SQuAD LCQMC eprstmt csl ocnli cmnli afqmc
        tnews iflytek cluewsc2020 chid bustm cmrc2018 drcd c3-m c3-d ag_news"""
    assert set(wanted.split()) <= set(TASKS)


@pytest.mark.skipif(not REAL.is_dir(), reason="real data is not on this machine")
def test_real_files() -> None:
    """Sizes as their makers give them."""
    reviews = {split: read_task("eprstmt", REAL, split) for split in ("train", "dev", "test")}
    assert {split: len(rows) for split, rows in reviews.items()} == SIZES
    raw = (REAL / "eprstmt" / "test_public.json").read_text("utf-8")
    assert sum(e.label == 1 for e in reviews["test"]) == raw.count('"label": "Positive"')
    news = read_task("ag_news", REAL, "test")
    assert [sum(e.label == n for e in news) for n in range(4)] == [1900] * 4

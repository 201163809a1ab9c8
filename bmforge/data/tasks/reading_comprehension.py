"""Reading comprehension tasks: SQuAD 1.1, CMRC 2018, DRCD, ChID (cloze), and C3.

Source: Rajpurkar et al. 2016; Zheng et al. 2019 (ChID); Sun et al. 2020 (C3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bmforge.data.tasks.task import BenchmarkTask, TaskExample, TaskRecord, read_json, read_records
from bmforge.errors import DataError

__all__ = ["READING"]

_BLANK = "#idiom"


def _read_squad(path: Path) -> Iterator[TaskExample]:
    """Yield one example per question, with the accepted answers in `answers`."""
    for article in TaskRecord(repr(str(path)), read_json(path)).parts("data"):
        for paragraph in article.parts("paragraphs"):
            context = paragraph.text("context")
            for question in paragraph.parts("qas"):
                right = question.parts("answers") if "answers" in question.values else []
                answers = tuple(answer.text("text") for answer in right)
                fields = {"context": context, "question": question.text("question")}
                first = answers[0] if answers else None
                yield TaskExample(fields, first, question.text("id"), answers=answers)


def _read_chid(path: Path) -> Iterator[TaskExample]:
    """Yield one example per blank, from files of FewCLUE or CLUE.

    A line of FewCLUE has one blank and its answer. A line of CLUE has a list of texts; the answers
    are in a separate file in the same folder, `dev_answer.json` for `dev.json`.
    """
    beside = path.with_name(f"{path.stem}_answer.json")
    answers: dict[str, Any] = read_json(beside) if beside.is_file() else {}
    for number, row in enumerate(read_records(path)):
        choices = row.texts("candidates")
        if isinstance(row.values.get("content"), list):
            for text in row.texts("content"):
                yield from _blanks(row, text, choices, answers)
        else:
            label = row.label({str(n): n for n in range(len(choices))}, "answer")
            idx = row.values.get("id", number)
            yield TaskExample({"content": row.text("content")}, label, idx, choices)


def _blanks(
    row: TaskRecord, text: str, choices: tuple[str, ...], answers: Mapping[str, Any]
) -> Iterator[TaskExample]:
    """Yield one example for each blank, such as #idiom000123#, in a text."""
    for after in text.split(_BLANK)[1:]:
        name = f"{_BLANK}{after.partition('#')[0]}#"
        label = answers.get(name)
        if label is not None and label not in range(len(choices)):
            raise DataError(
                f"{row.place}: the answer {label!r} to {name} is not the index of a candidate "
                f"(allowed: 0 to {len(choices) - 1})."
            )
        yield TaskExample({"content": text, "blank": name}, label, name, choices)


def _read_c3(path: Path) -> Iterator[TaskExample]:
    """Yield one example per question; an entry is [texts, questions with choices, name]."""
    for number, entry in enumerate(read_json(path)):
        location = f"{str(path)!r}, entry {number}"
        if not isinstance(entry, list) or len(entry) != 3:
            raise DataError(
                f"{location} must be a list of three values: a list of texts, a list of questions "
                "and a name. Use the file as it was published."
            )
        named = TaskRecord(location, {"context": entry[0], "questions": entry[1], "name": entry[2]})
        context = "\n".join(named.texts("context"))
        for question in named.parts("questions"):
            choices = question.texts("choice")
            label = question.label({choice: n for n, choice in enumerate(choices)}, "answer")
            fields = {"context": context, "question": question.text("question")}
            yield TaskExample(fields, label, named.text("name"), choices)


_CLUE = {
    "train": ("train.json", "train_0.json"),
    "dev": ("dev.json", "dev_0.json"),
    "test": ("test.json", "test_public.json", "test1.1.json"),
}
_C3 = {split: tuple(f"{kind}-{split}.json" for kind in "md") for split in ("train", "dev", "test")}
READING = (
    BenchmarkTask(
        "SQuAD", (), {"train": ("train-v1.1.json",), "dev": ("dev-v1.1.json",)}, _read_squad, True
    ),
    BenchmarkTask("cmrc2018", (), {**_CLUE, "trial": ("trial.json",)}, _read_squad, True),
    BenchmarkTask("drcd", (), _CLUE, _read_squad, True),
    BenchmarkTask("chid", (), _CLUE, _read_chid),
    BenchmarkTask("c3-m", (), {split: names[:1] for split, names in _C3.items()}, _read_c3),
    BenchmarkTask("c3-d", (), {split: names[1:] for split, names in _C3.items()}, _read_c3),
)

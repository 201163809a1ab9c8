"""The eight SuperGLUE tasks, read from the jsonl files of super.gluebenchmark.com.

Labels are in the order of ModelCenter and transformers.
Source: Wang et al. 2019, https://super.gluebenchmark.com/tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from bmforge.data.tasks.task import BenchmarkTask, TaskExample, TaskRecord, read_records
from bmforge.errors import DataError

__all__ = ["SUPERGLUE", "read_wsc"]

_FILES = {"train": ("train.jsonl",), "dev": ("val.jsonl", "dev.jsonl"), "test": ("test.jsonl",)}


def _classes(name: str, fields: tuple[str, ...], labels: tuple[str, ...]) -> BenchmarkTask:
    """Return a classification task whose lines contain texts and a label."""
    numbers = {label: number for number, label in enumerate(labels)}

    def read(path: Path) -> Iterator[TaskExample]:
        for row in read_records(path):
            texts = {field: row.text(field) for field in fields}
            yield TaskExample(texts, row.label(numbers), row.number("idx"))

    return BenchmarkTask(name, labels, _FILES, read)


def _task(
    name: str, labels: tuple[str, ...], make: Callable[[TaskRecord], list[TaskExample]]
) -> BenchmarkTask:
    def read(path: Path) -> Iterator[TaskExample]:
        for row in read_records(path):
            yield from make(row)

    return BenchmarkTask(name, labels, _FILES, read)


def _copa(row: TaskRecord) -> list[TaskExample]:
    choices = (row.text("choice1"), row.text("choice2"))
    texts = {"premise": row.text("premise"), "question": row.text("question")}
    return [TaskExample(texts, row.label({"0": 0, "1": 1}), row.number("idx"), choices)]


def read_wsc(row: TaskRecord) -> list[TaskExample]:
    """Return a WSC example: a text with two spans, labeled 1 if the second refers to the first."""
    target = row.part("target")
    spans = {name: target.text(name) for name in ("span1_text", "span2_text")}
    places = {name: str(target.number(name)) for name in ("span1_index", "span2_index")}
    label = row.label({"false": 0, "true": 1})
    return [TaskExample({"text": row.text("text"), **spans, **places}, label, row.number("idx"))]


def _multirc(row: TaskRecord) -> list[TaskExample]:
    """Return one example per MultiRC answer, labeled 1 if the answer is correct."""
    passage, out = row.part("passage"), []
    text = passage.text("text")
    for question in passage.parts("questions"):
        passage_fields = {"passage": text, "question": question.text("question")}
        at = (row.number("idx"), question.number("idx"))
        for answer in question.parts("answers"):
            label = answer.label({"0": 0, "1": 1})
            fields = {**passage_fields, "answer": answer.text("text")}
            out.append(TaskExample(fields, label, (*at, answer.number("idx"))))
    return out


def _record(row: TaskRecord) -> list[TaskExample]:
    """Return one example per ReCoRD query; the choices are the entities in the passage."""
    passage, out = row.part("passage"), []
    text = passage.text("text")
    names: dict[str, None] = {}  # distinct names in the order of the text
    for entity in passage.parts("entities"):
        start, end = entity.number("start"), entity.number("end") + 1
        if not 0 <= start < end <= len(text):
            raise DataError(
                f"{entity.place}: the span from character {start} to {end} is outside of the "
                f"passage of {len(text)} characters. Use the file as it was published."
            )
        names[text[start:end]] = None
    for query in row.parts("qas"):
        right = query.parts("answers") if "answers" in query.values else []
        answers = tuple(dict.fromkeys(answer.text("text") for answer in right))
        fields = {"passage": text, "query": query.text("query")}
        at = (row.number("idx"), query.number("idx"))
        first = answers[0] if answers else None
        out.append(TaskExample(fields, first, at, tuple(names), answers))
    return out


_NO_YES = ("false", "true")
SUPERGLUE = (
    _classes("BoolQ", ("passage", "question"), _NO_YES),
    _classes("CB", ("premise", "hypothesis"), ("contradiction", "entailment", "neutral")),
    _task("COPA", (), _copa),
    _classes("RTE", ("premise", "hypothesis"), ("not_entailment", "entailment")),
    _classes("WiC", ("sentence1", "sentence2", "word"), _NO_YES),
    _task("WSC", _NO_YES, read_wsc),
    _task("MultiRC", _NO_YES, _multirc),
    _task("ReCoRD", (), _record),
)

"""Classification tasks for single texts and text pairs, in their published file formats.

Sources: Zhang et al. 2015 (DBpedia, Yahoo! Answers, Amazon), Socher et al. 2013, Wang et al. 2018
(SST-2 in GLUE's format), Williams et al. 2018 (MNLI), Bowman et al. 2015 (SNLI), Tan 2009
(ChnSentiCorp), Zhang et al. 2017 and Stoica et al. 2021 (TACRED and Re-TACRED), Maas et al. 2011
(IMDB).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bmforge.data.sources.text_files import read_lines, read_text
from bmforge.data.tasks.task import BenchmarkTask, TaskExample, TaskRecord, read_json, read_records
from bmforge.errors import DataError

__all__ = ["SENTENCES", "YAHOO_TOPICS"]

_DBPEDIA_NAMES = """
Company EducationalInstitution Artist Athlete OfficeHolder MeanOfTransportation Building
NaturalPlace Village Animal Plant Album Film WrittenWork
"""
_DBPEDIA = tuple(_DBPEDIA_NAMES.split())
YAHOO_TOPICS = (
    "Society & Culture", "Science & Mathematics", "Health", "Education & Reference",
    "Computers & Internet", "Sports", "Business & Finance", "Entertainment & Music",
    "Family & Relationships", "Politics & Government",
)  # fmt: skip
_INFERENCE = ("entailment", "neutral", "contradiction")


def _csv_task(name: str, labels: tuple[str, ...], fields: tuple[str, ...]) -> BenchmarkTask:
    """Return a task whose files are CSV with the columns class (from 1) and texts."""

    def read(path: Path) -> Iterator[TaskExample]:
        lines = csv.reader(io.StringIO(read_text(path)))
        for number, cells in enumerate(lines, 1):
            is_valid = cells and cells[0].isdigit() and 1 <= int(cells[0]) <= len(labels)
            if not is_valid or len(cells) != 1 + len(fields):
                raise DataError(
                    f"{str(path)!r}, line {lines.line_num}: {cells!r:.80} is not a class from 1 to "
                    f"{len(labels)}, followed by {len(fields)} texts ({', '.join(fields)}). Use "
                    "the file as it was published."
                )
            texts = dict(zip(fields, cells[1:], strict=True))
            yield TaskExample(texts, int(cells[0]) - 1, number)

    return BenchmarkTask(name, labels, {"train": ("train.csv",), "test": ("test.csv",)}, read)


def _tsv_task(name: str, labels: tuple[str, ...], text: str) -> BenchmarkTask:
    """Return a task whose files are tab-separated, with the columns ``label`` and ``text``."""

    def read(path: Path) -> Iterator[TaskExample]:
        lines = iter(read_lines(path))
        head = next(lines, "").rstrip("\r\n").split("\t")
        if text not in head:
            raise DataError(
                f"{str(path)!r}, line 1: the header {head!r:.80} has no column {text!r}. Use the "
                "file as it was published."
            )
        for number, line in enumerate(lines, 2):
            cells = line.rstrip("\r\n").split("\t")
            if cells == [""]:
                continue
            if len(cells) != len(head):
                raise DataError(
                    f"{str(path)!r}, line {number}: the line has {len(cells)} cells, but the "
                    f"header has {len(head)}. Correct or remove the line."
                )
            row = dict(zip(head, cells, strict=True))
            label = row.get("label")
            if label is not None and label not in map(str, range(len(labels))):
                raise DataError(
                    f"{str(path)!r}, line {number}: label={label!r} must be an integer from 0 to "
                    f"{len(labels) - 1}."
                )
            yield TaskExample({text: row[text]}, None if label is None else int(label), number)

    return BenchmarkTask(name, labels, {s: (f"{s}.tsv",) for s in ("train", "dev", "test")}, read)


def _inference_task(name: str, stem: str, dev: tuple[str, ...]) -> BenchmarkTask:
    """Return a natural language inference task; pairs without an agreed label are skipped."""
    numbers = {label: number for number, label in enumerate(_INFERENCE)}

    def read(path: Path) -> Iterator[TaskExample]:
        for number, row in enumerate(read_records(path)):
            if row.values.get("gold_label") != "-":
                texts = {key: row.text(key) for key in ("sentence1", "sentence2")}
                idx = row.values.get("pairID", number)
                yield TaskExample(texts, row.label(numbers, "gold_label"), idx)

    files = {"train": (f"{stem}_train.jsonl",), "dev": tuple(f"{stem}_{d}.jsonl" for d in dev)}
    return BenchmarkTask(name, _INFERENCE, {**files, "test": (f"{stem}_test.jsonl",)}, read)


def _read_imdb(path: Path) -> Iterator[TaskExample]:
    """Yield reviews from the published folders (`pos`, `neg`), or from a file with one per line."""
    if path.is_dir():
        for label, name in enumerate(("neg", "pos")):
            reviews = (path / name).glob("*.txt")
            for file in sorted(reviews, key=lambda file: (len(file.stem.split("_")[0]), file.stem)):
                yield TaskExample({"text": read_text(file).strip()}, label, f"{name}/{file.stem}")
        return
    label_file = path.with_name(f"{path.stem}_labels.txt")
    labels = [line.strip() for line in read_lines(label_file)]
    lines = read_lines(path)
    if len(labels) != len(lines) or not set(labels) <= {"0", "1"}:
        raise DataError(
            f"{str(label_file)!r} must have one label, 0 or 1, for each of the {len(lines)} lines "
            f"of {str(path)!r}. Use the files as they were published."
        )
    for number, (line, told_label) in enumerate(zip(lines, labels, strict=True), 1):
        yield TaskExample({"text": line.strip()}, int(told_label), number)


def _relation_task(name: str, relations: tuple[str, ...]) -> BenchmarkTask:
    """Return a relation classification task: sentences with two marked spans."""
    numbers = {relation: number for number, relation in enumerate(relations)}

    def read(path: Path) -> Iterator[TaskExample]:
        rows: Any = read_json(path)
        if not isinstance(rows, list):
            raise DataError(
                f"{str(path)!r} contains a JSON {type(rows).__name__} (needed: a list of "
                "sentences). Use the file as it was published."
            )
        for number, values in enumerate(rows):
            row = TaskRecord(f"{str(path)!r}, entry {number}", values)
            words = row.texts("token")
            spans = {
                f"{who}_text": " ".join(
                    words[row.number(f"{who}_start") : row.number(f"{who}_end") + 1]
                )
                for who in ("subj", "obj")
            }
            types = {key: row.text(key) for key in ("subj_type", "obj_type")}
            fields = {"text": " ".join(words), **spans, **types}
            yield TaskExample(fields, row.label(numbers, "relation"), row.text("id"))

    return BenchmarkTask(name, relations, _JSON, read)


_RELATIONS = (
    "no_relation",
    "org:alternate_names",
    "org:city_of_headquarters",
    "org:country_of_headquarters",
    "org:dissolved",
    "org:founded",
    "org:founded_by",
    "org:member_of",
    "org:members",
    "org:number_of_employees/members",
    "org:parents",
    "org:political/religious_affiliation",
    "org:shareholders",
    "org:stateorprovince_of_headquarters",
    "org:subsidiaries",
    "org:top_members/employees",
    "org:website",
    "per:age",
    "per:alternate_names",
    "per:cause_of_death",
    "per:charges",
    "per:children",
    "per:cities_of_residence",
    "per:city_of_birth",
    "per:city_of_death",
    "per:countries_of_residence",
    "per:country_of_birth",
    "per:country_of_death",
    "per:date_of_birth",
    "per:date_of_death",
    "per:employee_of",
    "per:origin",
    "per:other_family",
    "per:parents",
    "per:religion",
    "per:schools_attended",
    "per:siblings",
    "per:spouse",
    "per:stateorprovince_of_birth",
    "per:stateorprovince_of_death",
    "per:stateorprovinces_of_residence",
    "per:title",
)
# Re-TACRED's classes: some of TACRED's have other names, and two are missing.
_RENAMED = {
    **{f"org:{level}_of_headquarters": f"org:{level}_of_branch"
       for level in ("city", "country", "stateorprovince")},
    "per:alternate_names": "per:identity",
}  # fmt: skip
_RE_RELATIONS = tuple(
    _RENAMED.get(name, name)
    for name in _RELATIONS
    if name not in ("org:parents", "org:subsidiaries")
)
_IMDB = {split: (split, f"aclImdb/{split}", f"{split}.txt") for split in ("train", "test")}
_JSON: dict[str, tuple[str, ...]] = {s: (f"{s}.json",) for s in ("train", "dev", "test")}

SENTENCES = (
    _csv_task("dbpedia", _DBPEDIA, ("title", "content")),
    _csv_task("yahoo_answers", YAHOO_TOPICS, ("title", "question", "answer")),
    _csv_task("amazon_polarity", ("negative", "positive"), ("title", "text")),
    _tsv_task("SST-2", ("negative", "positive"), "sentence"),
    _tsv_task("ChnSentiCorp", ("negative", "positive"), "text_a"),
    _inference_task("MNLI", "multinli_1.0", ("dev_matched",)),
    _inference_task("SNLI", "snli_1.0", ("dev",)),
    _relation_task("TACRED", _RELATIONS),
    _relation_task("Re-TACRED", _RE_RELATIONS),
    BenchmarkTask("imdb", ("negative", "positive"), _IMDB, _read_imdb),
)

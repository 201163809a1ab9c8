"""Readers of Few-NERD (entity types), LAMA (facts), and WebNLG (texts for triples).

Sources: Ding et al. 2021 (Few-NERD, its supervised files), Petroni et al. 2019 and Shin et al. 2020
(LAMA as AutoPrompt divides it, one folder per relation), Gardent et al. 2017 (WebNLG as JSON).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bmforge.data.sources.text_files import read_lines
from bmforge.data.tasks.task import BenchmarkTask, TaskExample, TaskRecord, read_json, read_records
from bmforge.errors import DataError

__all__ = ["CLOZE", "FEW_NERD_TYPES", "read_few_nerd"]

_TYPES = {
    "person": "actor director artist/author athlete politician scholar soldier other",
    "organization": "showorganization religion company sportsteam education "
    "government/governmentagency media/newspaper politicalparty sportsleague other",
    "location": "GPE road/railway/highway/transit bodiesofwater park mountain island other",
    "product": "software food game ship train airplane car weapon other",
    "building": "theater sportsfacility airport hospital library hotel restaurant other",
    "event": "sportsevent attack/battle/war/militaryconflict disaster election protest other",
    "art": "music writtenart film painting broadcastprogram other",
    "other": "biologything chemicalthing livingthing astronomything god law award disease medical "
    "language currency educationaldegree",
}
FEW_NERD_TYPES = tuple(f"{coarse}-{fine}" for coarse, row in _TYPES.items() for fine in row.split())


def read_few_nerd(path: Path) -> Iterator[TaskExample]:
    """Yield one example for each entity; adjacent tokens with the same type are one entity."""
    numbers = {name: number for number, name in enumerate(FEW_NERD_TYPES)}
    tokens: list[str] = []
    spans: list[tuple[int, int, str]] = []  # first token, one past the last, type
    count = 0
    for number, line in enumerate([*read_lines(path), ""], 1):
        cells = line.split()
        if not cells:
            for index, (first, behind, name) in enumerate(spans):
                fields = {"sentence": " ".join(tokens), "entity": " ".join(tokens[first:behind])}
                yield TaskExample(fields, numbers[name], (count, index))
            count += bool(tokens)
            tokens, spans = [], []
            continue
        name = cells[-1]
        if len(cells) != 2 or name not in {*numbers, "O"}:
            raise DataError(
                f"{str(path)!r}, line {number}: {line!r:.60} is not a token and one of the "
                f"{len(numbers)} entity types of Few-NERD (or O), separated by a space or a tab."
            )
        if name != "O":
            if spans and spans[-1][1:] == (len(tokens), name):
                spans[-1] = (spans[-1][0], len(tokens) + 1, name)
            else:
                spans.append((len(tokens), len(tokens) + 1, name))
        tokens.append(cells[0])


def _read_lama(path: Path) -> Iterator[TaskExample]:
    """Yield one example per fact; the choices are the objects of all splits in the folder.

    If `relations.jsonl` is in the folder or one of its two parents, `before` and `after` are the
    parts of the relation's sentence around the object; otherwise `before` is the subject.
    """
    choices = _objects(path.parent)
    numbers = {name: number for number, name in enumerate(choices)}
    sentences = _sentences(path.parent)
    for number, row in enumerate(read_records(path)):
        subject, relation = row.text("sub_label"), row.text("predicate_id")
        before, _, after = sentences.get(relation, "[X] [Y]").partition("[Y]")
        fields = {
            "before": before.replace("[X]", subject).strip(),
            "after": after.replace("[X]", subject).strip(),
            "subject": subject,
            "relation": relation,
        }
        idx = row.values.get("uuid", number)
        yield TaskExample(fields, row.label(numbers, "obj_label"), idx, choices)


def _objects(folder: Path) -> tuple[str, ...]:
    """Return the distinct objects of the facts in all files of a folder."""
    files = [file for file in sorted(folder.glob("*.jsonl")) if file.name != "relations.jsonl"]
    return tuple(sorted({row.text("obj_label") for file in files for row in read_records(file)}))


def _sentences(folder: Path) -> dict[str, str]:
    """Return the template sentence with [X] and [Y] of each relation."""
    for parent in (folder, folder.parent, folder.parent.parent):
        file = parent / "relations.jsonl"
        if file.is_file():
            return {row.text("relation"): row.text("template") for row in read_records(file)}
    return {}


def _read_webnlg(path: Path) -> Iterator[TaskExample]:
    """Yield triples with their reference texts; the training split has one example per text."""
    entries = TaskRecord(repr(str(path)), read_json(path)).parts("entries")
    for number, entry in enumerate(entries):
        (key,) = entry.values if len(entry.values) == 1 else (str(number + 1),)
        record = entry.part(key)
        parts = [
            " : ".join(triple.text(name) for name in ("subject", "property", "object"))
            for triple in record.parts("modifiedtripleset")
        ]
        fields = {"triples": " | ".join(parts), "category": record.text("category")}
        texts = [
            text.text("lex")
            for text in record.parts("lexicalisations")
            if text.values.get("comment") == "good"
        ]
        groups = [(text,) for text in texts] if path.stem == "train" else [tuple(texts)]
        for index, answers in enumerate(groups):
            yield TaskExample(fields, answers[0] if answers else None, (number, index), (), answers)


def _files(ending: str, folder: str = "") -> dict[str, tuple[str, ...]]:
    names = {split: f"{split}.{ending}" for split in ("train", "dev", "test")}
    return {s: (f"{folder}/{n}", n) if folder else (n,) for s, n in names.items()}


CLOZE = (
    BenchmarkTask("Few-NERD", FEW_NERD_TYPES, _files("txt", "supervised"), read_few_nerd),
    BenchmarkTask("LAMA", (), _files("jsonl"), _read_lama),
    BenchmarkTask("WebNLG", (), _files("json"), _read_webnlg, True),
)

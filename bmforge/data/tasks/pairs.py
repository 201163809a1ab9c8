"""Readers of table files: LCQMC (question paraphrases) and AG News (topics)."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

from bmforge.data.sources.text_files import read_lines, read_text
from bmforge.data.tasks.task import BenchmarkTask, TaskExample
from bmforge.errors import DataError

__all__ = ["AG_NEWS", "LCQMC"]


def _read_lcqmc(path: Path) -> Iterator[TaskExample]:
    """Yield the examples of a table with columns text_a, text_b, label, and an optional header.

    Cells are not quoted: a quotation mark is part of the question.
    """
    for number, line in enumerate(read_lines(path), 1):
        cells = line.rstrip("\r").split("\t")
        if cells == [""] or (number == 1 and cells[-1].strip() == "label"):
            continue
        if len(cells) not in (2, 3) or (len(cells) == 3 and cells[2].strip() not in ("0", "1")):
            raise DataError(
                f"{str(path)!r}, line {number}: {line!r:.80} is not two texts and a label "
                "(0 or 1), separated by tabs. Use the file as it was published."
            )
        label = int(cells[2]) if len(cells) == 3 else None
        yield TaskExample({"text_a": cells[0], "text_b": cells[1]}, label, number)


def _read_ag_news(path: Path) -> Iterator[TaskExample]:
    """Yield the examples of a table with columns class (1 to 4), title, text."""
    lines = csv.reader(io.StringIO(read_text(path)))
    for number, cells in enumerate(lines, 1):
        if len(cells) != 3 or cells[0] not in ("1", "2", "3", "4"):
            raise DataError(
                f"{str(path)!r}, line {lines.line_num}: {cells!r:.80} is not a class from 1 to "
                "4, a title and a text. Use the file as it was published."
            )
        yield TaskExample({"title": cells[1], "text": cells[2]}, int(cells[0]) - 1, number)


_TABLES = {split: (f"{split}.tsv", f"{split}.txt") for split in ("train", "dev", "test")}
LCQMC = BenchmarkTask("LCQMC", ("different", "same"), _TABLES, _read_lcqmc)
AG_NEWS = BenchmarkTask(
    "ag_news",
    ("World", "Sports", "Business", "Sci/Tech"),
    {"train": ("train.csv",), "test": ("test.csv",)},
    _read_ag_news,
)

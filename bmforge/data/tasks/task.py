"""Types that describe benchmark tasks and examples, and helpers for reading task files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bmforge.data.sources.text_files import read_lines, read_text
from bmforge.errors import ConfigError, DataError

__all__ = ["TaskRecord", "BenchmarkTask", "TaskExample", "find_split", "read_json", "read_records"]

_SPLIT_NAMES = {"val": "dev", "validation": "dev", "valid": "dev"}


@dataclass(frozen=True)
class TaskExample:
    """One example of a benchmark task.

    Attributes:
        fields: dict from field name to text.
        label: index into the task's `label_names`, or into `choices` if the example has its own;
            the first of `answers` for a text answer; None if the label is not published.
        idx: index in the task's files, or a tuple of indices; the tuples of several answers to one
            question differ only in the last index.
        choices: answer options of this example.
        answers: accepted texts, for tasks with text answers.
    """

    fields: Mapping[str, str]
    label: int | str | None
    idx: int | str | tuple[int, ...]
    choices: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()


@dataclass(frozen=True)
class BenchmarkTask:
    """Description of a benchmark task.

    Attributes:
        name: name in the benchmark's spelling.
        label_names: names of the labels, in order; empty if examples have choices or text answers.
        files: candidate names of the file, or folder, of each split; the first existing one is
            used.
        read: function that yields the examples of a file.
        asks_for_text: True if the answer is a free text.
    """

    name: str
    label_names: tuple[str, ...]
    files: Mapping[str, tuple[str, ...]]
    read: Callable[[Path], Iterator[TaskExample]]
    asks_for_text: bool = False


def find_split(task: BenchmarkTask, folder: str | Path, split: str) -> Path:
    """Return the path of a split's file, in `folder` or in its subfolder with the task's name.

    Raises:
        ConfigError: the task has no such split.
        DataError: no candidate file exists; the message lists the names.
    """
    split_name = _SPLIT_NAMES.get(split, split)
    if split_name not in task.files:
        raise ConfigError(
            f"{task.name} has no split {split!r} (available: {', '.join(task.files)})."
        )
    places = (Path(folder) / task.name, Path(folder))
    looked = [parent / name for parent in places for name in task.files[split_name]]
    existing = next((path for path in looked if path.exists()), None)
    if existing is None:
        raise DataError(
            f"{task.name} has no file for the split {split!r} (searched: "
            f"{', '.join(map(str, looked))}). Pass the folder that contains one of these files."
        )
    return existing


class TaskRecord:
    """Values of one entry in a task file; errors for bad values name the entry's location.

    Args:
        place: file and line, for error messages.
        values: dict from field name to value.
    """

    def __init__(self, place: str, values: Any) -> None:
        if not isinstance(values, dict):
            raise DataError(
                f"{place}: {values!r:.60} is not a JSON object. Correct or remove the line."
            )
        self.place = place
        self.values: dict[str, Any] = values

    def text(self, name: str) -> str:
        """Return the string in a field."""
        return str(self._get(name, str))

    def number(self, name: str) -> int:
        """Return the integer in a field."""
        return int(self._get(name, int))

    def parts(self, name: str) -> list[TaskRecord]:
        """Return the list of objects in a field, each as a `TaskRecord`."""
        return [
            TaskRecord(f"{self.place}, {name} {n}", v) for n, v in enumerate(self._get(name, list))
        ]

    def part(self, name: str) -> TaskRecord:
        """Return the object in a field as a `TaskRecord`."""
        return TaskRecord(f"{self.place}, {name}", self._get(name, dict))

    def texts(self, name: str) -> tuple[str, ...]:
        """Return the list of strings in a field."""
        values = self._get(name, list)
        if not all(isinstance(value, str) for value in values):
            raise DataError(
                f"{self.place}: {name!r} is not a list of strings. Write a list of strings."
            )
        return tuple(values)

    def label(self, names: Mapping[str, int], name: str = "label") -> int | None:
        """Return the index of the label in a field; None if the field is absent or empty."""
        value = self.values.get(name)
        if value is None or value == "":
            return None
        word = str(value).lower() if isinstance(value, bool) else str(value)
        if word not in names:
            label_names = ", ".join(list(names)[:20])
            raise DataError(
                f"{self.place}: {name}={value!r} is not a label (labels: {label_names})."
            )
        return names[word]

    def _get(self, name: str, kind: type) -> Any:
        if name not in self.values:
            has = ", ".join(self.values)
            raise DataError(
                f"{self.place}: the field {name!r} is missing (fields: {has or 'none'}). Add the "
                "field."
            )
        value = self.values[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise DataError(
                f"{self.place}: {name}={value!r:.60} is a {type(value).__name__} (needed: "
                f"{kind.__name__})."
            )
        return value


def read_records(path: Path) -> Iterator[TaskRecord]:
    """Yield the objects of a JSON lines file; empty lines are skipped.

    Raises:
        DataError: a line is not an object.
    """
    for number, line in enumerate(read_lines(path), 1):
        if line.strip():
            location = f"{str(path)!r}, line {number}"
            try:
                values = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{location} is not JSON ({error.msg}, column {error.colno}). Correct the line."
                ) from error
            yield TaskRecord(location, values)


def read_json(path: Path) -> Any:
    """Parse a JSON file.

    Raises:
        DataError: the file is not JSON.
    """
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise DataError(
            f"{str(path)!r} is not JSON ({error.msg}, line {error.lineno}). Download it again."
        ) from error

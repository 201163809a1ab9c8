"""The type of a task, and helpers that readers of tasks share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bmforge.data.sources.text_files import read_lines, read_text
from bmforge.errors import ConfigError, DataError

__all__ = ["Record", "Task", "TaskExample", "find_split", "read_json", "read_records"]

_SPLIT_NAMES = {"val": "dev", "validation": "dev", "valid": "dev"}


@dataclass(frozen=True)
class TaskExample:
    """One thing to be decided or answered.

    Attributes:
        fields: its texts by name.
        label: an index into the task's `label_names`, or into `choices` where the example brings
            its own; the first of `answers` where a text is wanted; None where it is kept secret.
        idx: what the task's files call it. Answers to one question share all but the last number.
        choices: what it is chosen from.
        answers: texts that are right, for tasks that ask for a text.
    """

    fields: Mapping[str, str]
    label: int | str | None
    idx: int | str | tuple[int, ...]
    choices: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """A task of a benchmark.

    Attributes:
        name: as its benchmark writes it.
        label_names: what labels mean, in order; empty where examples bring choices or want a text.
        files: split -> names its file, or folder of files, may have; the first that exists is
            taken.
        read: yields the examples of a file.
        asks_for_text: there is nothing to choose from: the answer is a text.
    """

    name: str
    label_names: tuple[str, ...]
    files: Mapping[str, tuple[str, ...]]
    read: Callable[[Path], Iterator[TaskExample]]
    asks_for_text: bool = False


def find_split(task: Task, folder: str | Path, split: str) -> Path:
    """Return the file of a split, in `folder` or in the folder of the task's name inside it.

    Raises:
        ConfigError: the task has no such split.
        DataError: there is no such file; those that were looked for are named.
    """
    wanted = _SPLIT_NAMES.get(split, split)
    if wanted not in task.files:
        raise ConfigError(f"{task.name} has no split {split!r}. It has: {', '.join(task.files)}.")
    places = (Path(folder) / task.name, Path(folder))
    looked = [place / name for place in places for name in task.files[wanted]]
    found = next((path for path in looked if path.exists()), None)
    if found is None:
        raise DataError(
            f"{task.name} has no file for {split!r}: none of {', '.join(map(str, looked))} exists. "
            "Name the folder that holds it."
        )
    return found


class Record:
    """The values of one entry of a file; what is missing or of a wrong kind is told with its place.

    Args:
        place: file and line, for messages.
        values: by name.
    """

    def __init__(self, place: str, values: Any) -> None:
        if not isinstance(values, dict):
            raise DataError(f"{place}: {values!r:.60} stands where an object is needed.")
        self.place = place
        self.values: dict[str, Any] = values

    def text(self, name: str) -> str:
        """Return a text."""
        return str(self._get(name, str))

    def number(self, name: str) -> int:
        """Return a whole number."""
        return int(self._get(name, int))

    def parts(self, name: str) -> list[Record]:
        """Return a list of objects."""
        return [Record(f"{self.place}, {name} {n}", v) for n, v in enumerate(self._get(name, list))]

    def part(self, name: str) -> Record:
        """Return an object."""
        return Record(f"{self.place}, {name}", self._get(name, dict))

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of texts."""
        values = self._get(name, list)
        if not all(isinstance(value, str) for value in values):
            raise DataError(f"{self.place}: {name!r} is not a list of texts.")
        return tuple(values)

    def label(self, names: Mapping[str, int], name: str = "label") -> int | None:
        """Return what `names` makes of a label; None where it is absent or left empty."""
        value = self.values.get(name)
        if value is None or value == "":
            return None
        word = str(value).lower() if isinstance(value, bool) else str(value)
        if word not in names:
            known = ", ".join(list(names)[:20])
            raise DataError(f"{self.place}: {name}={value!r} is not a label. Known: {known}.")
        return names[word]

    def _get(self, name: str, kind: type) -> Any:
        if name not in self.values:
            has = ", ".join(self.values)
            raise DataError(f"{self.place}: there is no {name!r}. It has: {has or 'nothing'}.")
        value = self.values[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise DataError(
                f"{self.place}: {name}={value!r:.60} is a {type(value).__name__}, needed is a "
                f"{kind.__name__}."
            )
        return value


def read_records(path: Path) -> Iterator[Record]:
    """Yield the objects of a file with one a line; empty lines are none.

    Raises:
        DataError: a line is not an object.
    """
    for number, line in enumerate(read_lines(path), 1):
        if line.strip():
            place = f"{str(path)!r}, line {number}"
            try:
                values = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{place}: no JSON ({error.msg}, column {error.colno}).") from error
            yield Record(place, values)


def read_json(path: Path) -> Any:
    """Return the contents of a JSON file.

    Raises:
        DataError: it is none.
    """
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise DataError(f"{str(path)!r}, line {error.lineno}: no JSON ({error.msg}).") from error

"""User-defined classification tasks: JSON lines with texts and a label."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from bmforge.data.tasks.task import BenchmarkTask, TaskExample, TaskRecord, read_records
from bmforge.errors import ConfigError, DataError
from bmforge.files import refuse_pipe

__all__ = ["make_task"]

_LABEL = "label"
# A field is referenced in a prompt template by its name.
_FORBIDDEN = frozenset("{}[].!:")


def make_task(labels: Sequence[str], path: str | Path, fields: Sequence[str] = ()) -> BenchmarkTask:
    """Build a classification task from a user's file.

    Args:
        labels: names of the labels.
        path: path of a file with one object per line: {"text": "...", "label": "..."}.
        fields: names of the text fields, in order (default: the fields of the file's first line
            except "label").

    Raises:
        ConfigError: there are fewer than two labels, a label occurs twice, or a field name is not
            valid in a prompt template.
        DataError: the file cannot be read, or its first line has no text.
    """
    if len(labels) < 2 or len(set(labels)) < len(labels):
        raise ConfigError(
            f"labels={list(labels)} must contain at least two different labels, which are the "
            "values of 'label' in the file."
        )
    names = tuple(fields) or _find_fields(Path(path))
    wrong = [name for name in names if _FORBIDDEN & set(name) or name == _LABEL]
    if wrong:
        raise ConfigError(
            f"the fields {wrong} of {str(path)!r} cannot be used: a field must not be named "
            f"{_LABEL!r} or contain any of {' '.join(sorted(_FORBIDDEN))}."
        )
    numbers = {label: number for number, label in enumerate(labels)}

    def read(file: Path) -> Iterator[TaskExample]:
        for number, row in enumerate(read_records(file), 1):
            texts = {name: row.text(name) for name in names}
            yield TaskExample(texts, row.label(numbers), number)

    return BenchmarkTask("own", tuple(labels), {}, read)


def _find_fields(path: Path) -> tuple[str, ...]:
    """Return the names of the text fields in a file's first line."""
    refuse_pipe(path)
    first: TaskRecord | None = next(read_records(path), None)
    values = {} if first is None else first.values
    names = [name for name, value in values.items() if isinstance(value, str) and name != _LABEL]
    if not names:
        raise DataError(
            f"{str(path)!r} has no text in its first line. Each line must be an object such as "
            '{"text": "...", "label": "..."}.'
        )
    return tuple(names)

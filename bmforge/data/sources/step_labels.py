"""Reads answers whose reasoning steps are labeled right or wrong, for process reward models.

The format is TRL's stepwise supervision: ``prompt`` (a text or messages), ``completions`` (the
texts of the steps) and ``labels`` (true or false for each step; null for a step without a label).
Source of the field names: huggingface.co/docs/trl/dataset_formats.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bmforge.data.sources.conversation_forms import read_tools, read_turns, with_system
from bmforge.data.sources.conversations import find_conversation_files, read_records
from bmforge.errors import DataError
from bmforge.tokenizers.chat_messages import Message

__all__ = ["StepExample", "read_step_labels"]

_READ = frozenset(("prompt", "completions", "labels", "tools", "functions", "system"))


@dataclass(frozen=True)
class StepExample:
    """An answer in reasoning steps, with the label of each step.

    Args:
        location: file and line, entry or row, for error messages.
        prompt: text, or messages.
        steps: texts of the steps in order.
        labels: True for a right step, False for a wrong one, None for a step without a label.
        tools: JSON schemas of the functions that the assistant may call; None without tools.
        fields: the record's other top-level fields.
    """

    location: str
    prompt: str | list[Message]
    steps: tuple[str, ...]
    labels: tuple[bool | None, ...]
    tools: list[dict[str, Any]] | None = None
    fields: dict[str, Any] = field(default_factory=dict)


def read_step_labels(path: str | os.PathLike[str]) -> list[StepExample]:
    """Read every answer with labeled steps from a file, or from all files of a folder.

    Args:
        path: a JSON file or a table (see `read_conversations`), or a folder of such files.

    Raises:
        DataError: the path does not exist, or a record has no steps, or not one label per step.
        MissingDependencyError: a Parquet file is read, and pyarrow is not installed.
    """
    return [
        _read_record(location, record)
        for file in find_conversation_files(path)
        for location, record in read_records(file)
    ]


def _read_record(location: str, record: Any) -> StepExample:
    values: Mapping[str, Any] = record if isinstance(record, dict) else {}
    steps, labels = values.get("completions"), values.get("labels")
    if not isinstance(steps, list) or not isinstance(labels, list) or "prompt" not in values:
        raise DataError(
            f"{location} has no steps with labels (needed: 'prompt', 'completions' with the texts "
            "of the steps, and 'labels' with true or false for each)."
        )
    if not steps or not all(isinstance(step, str) and step.strip() for step in steps):
        raise DataError(f"{location}: 'completions' must be a list of non-empty strings.")
    if len(steps) != len(labels):
        raise DataError(
            f"{location}: 'labels' has {len(labels)} entries for {len(steps)} steps. Write one "
            "label for each string of 'completions'."
        )
    marks = tuple(_read_label(label, location) for label in labels)
    fields = {k: v for k, v in values.items() if k not in _READ and v not in (None, "", [])}
    prompt = _read_prompt(values, location)
    return StepExample(location, prompt, tuple(steps), marks, read_tools(values, location), fields)


def _read_label(label: Any, location: str) -> bool | None:
    if label is None:
        return None
    if not isinstance(label, bool) and label not in (0, 1):
        raise DataError(f"{location}: labels contains {label!r} (allowed: true, false, null).")
    return bool(label)


def _read_prompt(values: Mapping[str, Any], location: str) -> str | list[Message]:
    prompt = values["prompt"]
    if isinstance(prompt, list) and prompt:
        return with_system(values, read_turns(prompt, location))
    if not isinstance(prompt, str) or not prompt:
        raise DataError(f"{location}: 'prompt' must be a string or a list of messages.")
    return prompt

"""Loads the examples of a published task, or of the user's own files with labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bmforge.data.tasks import TASKS, BenchmarkTask, TaskExample, read_task
from bmforge.data.tasks.user_tasks import make_task
from bmforge.errors import ConfigError, DataError, suggest
from bmforge.recipes.inputs.examples import ExampleConfig

__all__ = ["TaskDataConfig", "label_names", "open_task", "order_labels", "read_examples"]


@dataclass(kw_only=True)
class TaskDataConfig(ExampleConfig):
    """Task to train on; the other fields are those of `ExampleConfig`.

    Args:
        task: name of a published task, such as BoolQ or ag_news (if None: custom data).
        labels: labels of custom data.
        fields: names of the text fields of custom data, in reading order (if empty: the text fields
            of the first line).
        paths: directory with the files of the published task, or with a subdirectory named like the
            task. For custom data, .jsonl files with {"text": "...", "label": "..."} on each line.
        validation: held-out files of custom data, in the same format.
        train_split: split of a published task for training.
        dev_split: split of a published task for evaluation; None disables evaluation.
        seq_len: maximum sequence length in tokens; longer texts are truncated.
    """

    task: str | None = None
    labels: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    train_split: str = "train"
    dev_split: str | None = "dev"

    def check(self) -> None:
        """Raise `ConfigError` for a number out of range, an unknown task, or unsupported paths."""
        super().check()
        if self.labels:
            self._check_own()
        elif self.task is None:
            raise ConfigError(
                "data.task is not set. Choose a published task with --data.task (such "
                "as BoolQ or ag_news), or pass --data.labels and .jsonl files for a "
                "custom task."
            )
        else:
            self._check_published(self.task)

    def _check_own(self) -> None:
        if self.task is not None:
            raise ConfigError(
                f"data.labels={list(self.labels)} define a custom task, but {self.task} has its "
                "own labels. Leave data.task or data.labels out."
            )
        if self.split:
            raise ConfigError(
                "data.split divides token stores, but this task reads files. Leave it out, and "
                "set data.validation to the validation files."
            )

    def _check_published(self, task: str) -> None:
        if task not in TASKS:
            raise ConfigError(
                f"unknown task: data.task={task!r} (published tasks: {', '.join(TASKS)})."
                f"{suggest(task, TASKS)} For a custom task, set data.labels instead."
            )
        if self.fields:
            raise ConfigError(
                f"data.fields has no effect on {task!r}, whose fields are fixed. Leave it out."
            )
        if len(self.paths) != 1:
            raise ConfigError(
                f"data.paths={list(self.paths)} must be one folder, with the files of {task}."
            )
        if self.validation or self.split:
            raise ConfigError(
                "data.validation and data.split have no effect on a published task, which "
                "has its own splits. Set data.dev_split instead."
            )


def label_names(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the label names in the contents of a config.json, in the order of the outputs."""
    names = raw.get("id2label") or {}
    return tuple(names[key] for key in sorted(names, key=int))


def order_labels(labels: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Return the labels of a data set, sorted into the order of a classifier's outputs.

    If the classifier has other labels, the order does not change. Case is ignored.

    Args:
        labels: labels of the data set.
        names: label names of the classifier, in the order of its outputs.
    """
    places = {str(name).casefold(): number for number, name in enumerate(names)}
    if len(labels) != len(names) or {label.casefold() for label in labels} != set(places):
        return tuple(labels)
    return tuple(sorted(labels, key=lambda label: places[label.casefold()]))


def open_task(data: TaskDataConfig) -> BenchmarkTask:
    """Return the task that a checked config describes.

    Raises:
        BmforgeError: the labels or the first file of user data are invalid.
    """
    if data.task is not None:
        return TASKS[data.task]
    return make_task(data.labels, data.paths[0], data.fields)


def read_examples(
    data: TaskDataConfig,
) -> tuple[BenchmarkTask, list[TaskExample], list[TaskExample]]:
    """Return a task, its training examples, and its held-out examples.

    Raises:
        ConfigError: the fields of `data` conflict.
        DataError: a file is missing or damaged, or there is no training example.
    """
    data.check()
    task = open_task(data)
    held_out = []
    if data.task is None:
        train = [example for path in data.paths for example in task.read(Path(path))]
        held_out = [example for path in data.validation for example in task.read(Path(path))]
    else:
        train = read_task(data.task, data.paths[0], data.train_split)
        if data.dev_split is not None:
            held_out = read_task(data.task, data.paths[0], data.dev_split)
    if data.validation_batches is not None:
        held_out = held_out[: data.validation_batches * data.micro_batch_size]
    if not train:
        raise DataError(
            f"{task.name} has no training example in {list(data.paths)}. Use files with at least "
            "one example."
        )
    return task, train, held_out

"""Reads published evaluation tasks as examples with labels.

Start reading at `task.py` (the types), then at a table of tasks: `superglue`, `clue`,
`reading_comprehension`, `sentences`, `pairs`, `cloze` (entities, facts, triples). `user_tasks.py`
builds a task from a user's file. `wording.py` has prompt templates, `rows.py` converts examples
into token ids, and `metrics.py` computes metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bmforge.data.tasks.cloze import CLOZE
from bmforge.data.tasks.clue import CLUE
from bmforge.data.tasks.pairs import AG_NEWS, LCQMC
from bmforge.data.tasks.reading_comprehension import READING
from bmforge.data.tasks.sentences import SENTENCES
from bmforge.data.tasks.superglue import SUPERGLUE
from bmforge.data.tasks.task import BenchmarkTask, TaskExample, find_split
from bmforge.errors import ConfigError, suggest

__all__ = ["TASKS", "BenchmarkTask", "TaskExample", "find_task", "read_task"]

TASKS: Mapping[str, BenchmarkTask] = {
    task.name: task for task in (*SUPERGLUE, *CLUE, *READING, LCQMC, AG_NEWS, *SENTENCES, *CLOZE)
}


def find_task(name: str) -> BenchmarkTask:
    """Return the task with a name, ignoring case.

    Raises:
        ConfigError: no task has this name.
    """
    for task_name, task in TASKS.items():
        if task_name.lower() == name.lower():
            return task
    raise ConfigError(
        f"unknown task {name!r} (supported: {', '.join(TASKS)}).{suggest(name, TASKS)}"
    )


def read_task(name: str, folder: str | Path, split: str) -> list[TaskExample]:
    """Read the examples of one split of a task.

    Args:
        name: a name in `TASKS`.
        folder: the task's folder, or its parent folder.
        split: "train", "dev" (also "val", "validation") or "test".

    Raises:
        ConfigError: the task or the split does not exist.
        DataError: the file is missing, or a line has the wrong format.
    """
    if name not in TASKS:
        raise ConfigError(
            f"unknown task {name!r} (supported: {', '.join(TASKS)}).{suggest(name, TASKS)}"
        )
    task = TASKS[name]
    return list(task.read(find_split(task, folder, split)))

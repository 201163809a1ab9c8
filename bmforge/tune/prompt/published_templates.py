"""Templates and label words for tasks: those published with OpenPrompt, and generic ones.

Both are stored in `published.json`: for each task the templates, and the words of every class in
the task's order (one word per mask for a template with several masks). Templates that repeat a
text, or have unnecessary text after the mask, are simplified there, and a word shared by several
classes is assigned to only one of them. A task without label words uses the wording of
`data.tasks.wording`, with the mask at the end, which every kind of model supports; this template
comes after the published ones.
Source: scripts/ of thunlp/OpenPrompt (Apache-2.0): FewGLUE, LMBFF, RelationClassification,
SuperGLUE, TextClassification, Typing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from bmforge.data.tasks import BenchmarkTask, TaskExample
from bmforge.data.tasks.wording import word_task

__all__ = ["Published", "find_published", "read_published"]

_MASK = '{"mask"}'
_FIELD = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Published:
    """Templates and label words of a task.

    Args:
        templates: templates as strings in the template language.
        words: words of every class in the task's order; () for a generation task.
    """

    templates: tuple[str, ...]
    words: tuple[tuple[str, ...], ...] = ()


@cache
def read_published() -> Mapping[str, Published]:
    """Return a dict from task name to its published templates and label words."""
    table = json.loads((files(__package__) / "published.json").read_text("utf-8"))
    return {
        name: Published(tuple(row["templates"]), tuple(map(tuple, row.get("words", ()))))
        for name, row in table.items()
    }


def find_published(task: BenchmarkTask, example: TaskExample) -> Published:
    """Return the templates and label words for a task.

    Args:
        task: any task.
        example: an example of the task.
    """
    own = read_published().get(task.name, Published(()))
    if own.words:
        return own
    if task.asks_for_text:
        names = ", ".join(f'{name}: {{"placeholder":"{name}"}}' for name in example.fields)
        return Published((*own.templates, f"{names} answer: {_MASK}"))
    wording = word_task(task, example)
    text = _FIELD.sub(lambda m: f'{{"placeholder":"{m[1]}"}}', wording.prompt) + f" {_MASK}"
    templates = (*own.templates, text)
    if example.choices:
        rules = [f'{{"meta":"choice{n}"}}' for n in range(1, len(example.choices) + 1)]
        return Published(templates, _rows(rules))
    return Published(templates, _rows(wording.words))


def _rows(words: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    return tuple((word,) for word in words)

"""Templates and label words of tasks: those that were published with OpenPrompt, and plain ones.

They lie in `published.json`: task -> templates, and for every class in the task's order its words;
of a template with several masks a word for each. What repeats a text, or stands behind the mask
where it need not, is written more simply there, and a word that classes share stays with one. A
task without words of its own is put into words as `data.tasks.wording` has it, with the mask at the
end, so that every kind of model can be asked; that template is then its last.

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

from bmforge.data.tasks import Task, TaskExample
from bmforge.data.tasks.wording import word_task

__all__ = ["Published", "find_published", "read_published"]

_MASK = '{"mask"}'
_FIELD = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Published:
    """A task in prompts.

    Args:
        templates: texts in the template language.
        words: for every class in the task's order its words; () of a task that asks for a text.
    """

    templates: tuple[str, ...]
    words: tuple[tuple[str, ...], ...] = ()


@cache
def read_published() -> Mapping[str, Published]:
    """Return task -> what was published of it."""
    found = json.loads((files(__package__) / "published.json").read_text("utf-8"))
    return {
        name: Published(tuple(row["templates"]), tuple(map(tuple, row.get("words", ()))))
        for name, row in found.items()
    }


def find_published(task: Task, example: TaskExample) -> Published:
    """Return a task's prompts.

    Args:
        task: any.
        example: one of its.
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

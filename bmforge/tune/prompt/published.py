"""Templates and label words of tasks: those that were published with OpenPrompt, and plain ones.

A task without an entry is put into words as `data.tasks.wording` has it, with the mask at the end,
so that every kind of model can be asked.

Source: scripts/TextClassification of thunlp/OpenPrompt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bmforge.data.tasks import Task, TaskExample
from bmforge.data.tasks.wording import word_task
from bmforge.errors import ConfigError

__all__ = ["PUBLISHED", "Published", "find_published"]

_A, _B, _MASK = '{"placeholder":"text_a"}', '{"placeholder":"text_b"}', '{"mask"}'
_FIELD = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Published:
    """A task in prompts.

    Args:
        templates: texts in the template language.
        words: for every class in the task's order its words; () where examples bring choices.
    """

    templates: tuple[str, ...]
    words: tuple[tuple[str, ...], ...] = ()


PUBLISHED: Mapping[str, Published] = {
    "ag_news": Published(
        (
            f"{_A} {_B} This topic is about {_MASK}",
            f"A {_MASK} news : {_A} {_B}",
            f"[ Topic : {_MASK} ] {_A} {_B}",
            f"[ Category : {_MASK} ] {_A} {_B}",
        ),
        (("politics", "world"), ("sports",), ("business",), ("technology", "science")),
    ),
    "eprstmt": Published((f"{_A} 总的来说，这很{_MASK}", f"{_MASK}评：{_A}"), (("差",), ("好",))),
}


def find_published(task: Task, example: TaskExample) -> Published:
    """Return a task's prompts.

    Args:
        task: any.
        example: one of its.

    Raises:
        ConfigError: its examples bring choices of different numbers, which no class's word tells.
    """
    if task.name in PUBLISHED:
        return PUBLISHED[task.name]
    wording = word_task(task, example)
    text = _FIELD.sub(lambda m: f'{{"placeholder":"{m[1]}"}}', wording.prompt) + f" {_MASK}"
    if example.choices:
        rules = [f'{{"meta":"choice{n}"}}' for n in range(1, len(example.choices) + 1)]
        return Published((text,), _rows(rules))
    if not wording.words:
        raise ConfigError(
            f"{task.name} asks for a text: train on it with prompt-generate, not prompt-classify."
        )
    return Published((text,), _rows(wording.words))


def _rows(words: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    return tuple((word,) for word in words)

"""Prompts of tasks: segments for encoders, questions and answers for other models.

Templates name an example's fields; `choice` is one of those it brings. The words of the SuperGLUE
tasks are ModelCenter's. A task without a wording of its own gets a plain one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bmforge.data.tasks import Task, TaskExample

__all__ = ["Wording", "word_task"]

_NO_YES = ("No", "Yes")
_ENTAILS = "Sentence 1: {premise} Sentence 2: {hypothesis} Does sentence 1 entail sentence 2?"


@dataclass(frozen=True)
class Wording:
    """A task in words.

    Args:
        segments: what an encoder reads, one text or two; of a task with choices, for each of them.
        prompt: what a language model reads before it answers.
        words: the answer for every label; empty where an example's choices or texts are answers.
        renames: field -> what its values are written as.
    """

    segments: tuple[str, ...]
    prompt: str
    words: tuple[str, ...] = ()
    renames: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def write_segments(self, example: TaskExample, choice: str = "") -> tuple[str, ...]:
        """Return an encoder's texts."""
        fields = self._fields(example, choice)
        return tuple(segment.format_map(fields) for segment in self.segments)

    def write_prompt(self, example: TaskExample) -> str:
        """Return the text before the answer."""
        return self.prompt.format_map(self._fields(example, ""))

    def options(self, example: TaskExample) -> tuple[str, ...]:
        """Return the answers to choose from."""
        return example.choices or self.words

    def _fields(self, example: TaskExample, choice: str) -> dict[str, str]:
        fields = {"choice": choice, **example.fields}
        for name, values in self.renames.items():
            fields[name] = values.get(fields[name], fields[name])
        if "query" in fields:
            fields["filled"] = fields["query"].replace("@placeholder", choice)
        return fields


_WORDINGS = {
    "BoolQ": Wording(("{passage}", "{question}"), "{passage}. {question}?", _NO_YES),
    "CB": Wording(("{premise}", "{hypothesis}"), _ENTAILS, ("No", "Yes", "Maybe")),
    "COPA": Wording(
        ("{premise} {question}", "{choice}"),
        "{premise} {question}",
        renames={"question": {"cause": "because", "effect": "so"}},
    ),
    "RTE": Wording(("{premise}", "{hypothesis}"), _ENTAILS, _NO_YES),
    "WiC": Wording(
        ("{word}: {sentence1}", "{sentence2}"),
        "Sentence 1: {sentence1} Sentence 2: {sentence2} Does the word {word} in sentence 1 "
        "express the same meaning as in sentence 2?",
        _NO_YES,
    ),
    "WSC": Wording(
        ("{text}", "{span2_text}: {span1_text}"),
        "{text} Does {span2_text} refer to {span1_text}?",
        _NO_YES,
    ),
    "MultiRC": Wording(
        ("{passage}", "{question} {answer}"),
        '{passage} Is "{answer}" the answer to the question "{question}"?',
        _NO_YES,
    ),
    "ReCoRD": Wording(
        ("{passage}", "{filled}"), "{passage}\n{query}\nWhich entity is the @placeholder?"
    ),
}


def word_task(task: Task, example: TaskExample) -> Wording:
    """Return the wording of a task.

    Args:
        task: any.
        example: one of its, whose fields a plain wording lists.
    """
    if task.name in _WORDINGS:
        return _WORDINGS[task.name]
    names = list(example.fields)
    first, rest = f"{{{names[0]}}}", " ".join(f"{{{name}}}" for name in names[1:])
    second = " ".join(part for part in (rest, "{choice}" if example.choices else "") if part)
    listed = "\n".join(f"{name}: {{{name}}}" for name in names)
    return Wording((first, second) if second else (first,), f"{listed}\nanswer:", task.label_names)

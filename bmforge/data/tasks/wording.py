"""Prompt templates of tasks: segments for encoders, prompts and answers for language models.

Templates refer to an example's fields; `choice` is one of its choices. The templates of the
SuperGLUE tasks are ModelCenter's. Other tasks get a generic template.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bmforge.data.tasks import BenchmarkTask, TaskExample

__all__ = ["Wording", "word_task"]

_NO_YES = ("No", "Yes")
_ENTAILS = "Sentence 1: {premise} Sentence 2: {hypothesis} Does sentence 1 entail sentence 2?"


@dataclass(frozen=True)
class Wording:
    """Prompt templates of a task.

    Args:
        segments: one or two templates of an encoder's input; for a task with choices, one input per
            choice.
        prompt: template of a language model's prompt.
        words: answer text of each label; empty if an example's choices or texts are the answers.
        renames: dict from a field to a dict from its values to the words that replace them in the
            templates, such as "because" for "cause".
    """

    segments: tuple[str, ...]
    prompt: str
    words: tuple[str, ...] = ()
    renames: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def write_segments(self, example: TaskExample, choice: str = "") -> tuple[str, ...]:
        """Fill in the templates of an encoder's input texts."""
        fields = self._fields(example, choice)
        return tuple(segment.format_map(fields) for segment in self.segments)

    def write_prompt(self, example: TaskExample) -> str:
        """Fill in the template of the prompt, which ends before the answer."""
        return self.prompt.format_map(self._fields(example, ""))

    def options(self, example: TaskExample) -> tuple[str, ...]:
        """Return the candidate answers of an example."""
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


def word_task(task: BenchmarkTask, example: TaskExample) -> Wording:
    """Return the prompt templates for a task.

    Args:
        task: any task; generic templates are built for a task that has none.
        example: an example of the task, whose fields a generic template lists.
    """
    if task.name in _WORDINGS:
        return _WORDINGS[task.name]
    names = list(example.fields)
    first, others = f"{{{names[0]}}}", " ".join(f"{{{name}}}" for name in names[1:])
    second = " ".join(part for part in (others, "{choice}" if example.choices else "") if part)
    listed = "\n".join(f"{name}: {{{name}}}" for name in names)
    return Wording((first, second) if second else (first,), f"{listed}\nanswer:", task.label_names)

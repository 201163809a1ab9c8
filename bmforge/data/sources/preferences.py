"""Reads preference data: pairs of chosen and rejected answers, and single rated answers.

`read_preferences` is the entry point. Formats: TRL's explicit (``prompt``, ``chosen``,
``rejected``) and implicit prompts (whole texts or conversations), its unpaired ``prompt``,
``completion`` and ``label``, rated ``completions`` with ``scores``; LLaMA-Factory's Alpaca and
ShareGPT formats with ``chosen`` and ``rejected``, and its ``kto_tag``.
Sources of the field names: huggingface.co/docs/trl/dataset_formats,
github.com/hiyouga/LLaMA-Factory (data/README.md).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bmforge.data.sources.conversation_forms import read_tools, read_turns, with_system
from bmforge.data.sources.conversations import find_conversation_files, read_records
from bmforge.errors import DataError
from bmforge.tokenizers.chat_messages import Message

__all__ = ["PreferenceExample", "read_preferences"]

Content = str | list[Message]

_READ_FIELDS = """
    prompt chosen rejected completion completions label kto_tag scores score_chosen score_rejected
    chosen_score rejected_score margin tools functions system messages conversations instruction
    input history output ranking
"""
_READ = frozenset(_READ_FIELDS.split())
_CHOSEN_SCORES = ("chosen_score", "score_chosen")
_REJECTED_SCORES = ("rejected_score", "score_rejected")


@dataclass(frozen=True)
class PreferenceExample:
    """A prompt with a chosen and a rejected answer, or with only one of them.

    Args:
        location: file and line, entry or row, for error messages.
        prompt: text, or messages; None if `chosen` and `rejected` are whole texts that begin with
            the prompt.
        chosen: preferred answer: text, or the messages after the prompt; None if the only answer is
            rated bad.
        rejected: answer that is not preferred; None if the only answer is rated good.
        margin: difference of the answers' scores; None without scores.
        tools: JSON schemas of the functions that the assistant may call; None without tools.
        fields: the record's other top-level fields.
        margin_fields: names of the record's fields that state the margin.
    """

    location: str
    prompt: Content | None
    chosen: Content | None
    rejected: Content | None
    margin: float | None = None
    tools: list[dict[str, Any]] | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    margin_fields: tuple[str, ...] = ()


def read_preferences(path: str | os.PathLike[str]) -> list[PreferenceExample]:
    """Read every preference example from a file, or from all files of a folder.

    Args:
        path: a JSON file or a table (see `read_conversations`), or a folder of such files.

    Raises:
        DataError: the path does not exist, a file cannot be decoded, or a record is not a
            preference example.
        MissingDependencyError: a Parquet file is read, and pyarrow is not installed.
    """
    return [
        example
        for file in find_conversation_files(path)
        for location, record in read_records(file)
        for example in _read_record(location, record)
    ]


def _read_record(location: str, record: Any) -> list[PreferenceExample]:
    values = record if isinstance(record, dict) else {}
    shared = {
        "tools": read_tools(values, location),
        "fields": {k: v for k, v in values.items() if k not in _READ and v not in (None, "", [])},
    }
    if "chosen" in values and "rejected" in values:
        return [_read_pair(values, location, shared)]
    if "completions" in values and "scores" in values:
        return [_read_rated(values, location, shared)]
    mark = next((name for name in ("label", "kto_tag") if name in values), None)
    if mark is not None:
        return [_read_marked(values, mark, location, shared)]
    raise DataError(
        f"{location} is not a preference record (needed: 'chosen' and 'rejected', with or "
        "without 'prompt'; 'prompt', 'completion' and 'label'; or 'prompt', 'completions' and "
        "'scores')."
    )


def _read_pair(values: Mapping[str, Any], location: str, shared: Any) -> PreferenceExample:
    margin = _read_margin(values, location)
    names = () if "scores" in values else ("margin", *_CHOSEN_SCORES, *_REJECTED_SCORES)
    shared = {**shared, "margin_fields": tuple(n for n in names if values.get(n) is not None)}
    prompt = _read_prompt(values, location)
    chosen, rejected = (
        _read_content(values[name], location, name) for name in ("chosen", "rejected")
    )
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError(
            f"{location}: 'chosen' and 'rejected' must both be strings, or both lists of messages."
        )
    if isinstance(chosen, str) or isinstance(rejected, str):
        if isinstance(prompt, list):  # the answers of a conversation may be texts
            chosen, rejected = ([_answer(text)] for text in (chosen, rejected))
        else:
            _refuse_system(values, location)
        return PreferenceExample(location, prompt, chosen, rejected, margin, **shared)
    if _repeats_prompt(prompt, chosen):
        prompt = None
    if prompt is None:
        prompt, chosen, rejected = _split_messages(chosen, rejected, location)
    elif isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    prompt = with_system(values, prompt)
    for answer in (chosen, rejected):
        _check_answer(answer, location)
    return PreferenceExample(location, prompt, chosen, rejected, margin, **shared)


def _refuse_system(values: Mapping[str, Any], location: str) -> None:
    """Raise `DataError` if a record whose prompt and answers are texts has a system message."""
    if values.get("system"):
        raise DataError(
            f"{location}: 'system' has no effect, because prompt and answers are texts, which are "
            "not rendered with the chat template. Leave it out, or write the prompt as a list of "
            "messages."
        )


def _answer(text: Any) -> Message:
    return {"role": "assistant", "content": text}


def _read_content(value: Any, location: str, name: str) -> Content:
    """Parse a field that contains a string, one message, or a list of messages."""
    if isinstance(value, str):
        return value
    turns = [value] if isinstance(value, dict) else value
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{location}: {name!r} must be a string or a list of messages.")
    return read_turns(turns, location)


def _read_prompt(values: Mapping[str, Any], location: str) -> Content | None:
    """Return the prompt of a record in any format; None if the record has none."""
    for name in ("messages", "conversations"):
        if isinstance(values.get(name), list) and values[name]:
            return with_system(values, read_turns(values[name], location))
    if isinstance(values.get("instruction"), str):
        parts = [values["instruction"], values.get("input") or ""]
        text = "\n".join(part for part in parts if part)
        history = [
            message
            for pair in values.get("history") or []
            for message in ({"role": "user", "content": pair[0]}, _answer(pair[1]))
        ]
        return with_system(values, [*history, {"role": "user", "content": text}])
    if values.get("prompt") is None:
        return None
    prompt = _read_content(values["prompt"], location, "prompt")
    return prompt if isinstance(prompt, str) else with_system(values, prompt)


def _repeats_prompt(prompt: Content | None, chosen: Sequence[Message]) -> bool:
    """Return True if the answers are whole conversations that begin with the prompt."""
    if chosen[0]["role"] in ("assistant", "tool"):
        return False
    first = next((m for m in chosen if m["role"] == "user"), None)
    if isinstance(prompt, str):
        return first is not None and first["content"] == prompt
    return prompt is None or list(chosen[: len(prompt)]) == prompt


def _split_messages(
    chosen: list[Message], rejected: list[Message], location: str
) -> tuple[list[Message], list[Message], list[Message]]:
    """Split two conversations into their common prompt and their different answers.

    The prompt ends before the first assistant message that differs, or, if one conversation
    continues the other, before the last assistant message that both have.
    """
    length = min(len(chosen), len(rejected)) - 1
    end = next((n for n in range(length) if chosen[n] != rejected[n]), length)
    while end and not all(m[end]["role"] == "assistant" for m in (chosen, rejected)):
        end -= 1
    prompt = chosen[:end]
    if not prompt or not all(m[end]["role"] == "assistant" for m in (chosen, rejected)):
        raise DataError(
            f"{location}: 'chosen' and 'rejected' have no common messages before the answer of "
            "the assistant. Pass the messages before the answers as 'prompt'."
        )
    return prompt, chosen[end:], rejected[end:]


def _check_answer(messages: Content, location: str) -> None:
    if isinstance(messages, list) and not any(m["role"] == "assistant" for m in messages):
        raise DataError(
            f"{location}: an answer has no assistant message. Add an assistant message, or remove "
            "the entry."
        )


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def _read_margin(values: Mapping[str, Any], location: str) -> float | None:
    """Return the preference margin: ``margin`` or the score difference; None if missing."""
    chosen, rejected = (
        next((values[name] for name in names if values.get(name) is not None), None)
        for names in (_CHOSEN_SCORES, _REJECTED_SCORES)
    )
    margin = values.get("margin")
    numbers = [n for n in (chosen, rejected, margin) if n is not None]
    if not all(_is_number(n) for n in numbers):
        raise DataError(
            f"{location}: the margin and the scores must be finite numbers. Correct the record."
        )
    if margin is not None:
        return float(margin)
    return None if chosen is None or rejected is None else float(chosen) - float(rejected)


def _read_rated(values: Mapping[str, Any], location: str, shared: Any) -> PreferenceExample:
    """Build a preference from the best and the worst of several answers with scores."""
    answers, scores = values["completions"], values["scores"]
    fits = isinstance(answers, list) and isinstance(scores, list) and len(answers) == len(scores)
    if not fits or len(answers) < 2 or not all(_is_number(score) for score in scores):
        raise DataError(
            f"{location}: 'completions' and 'scores' must be lists of the same length, at least "
            "2, with finite numbers as scores."
        )
    if min(scores) == max(scores):
        raise DataError(
            f"{location}: all 'scores' are {scores[0]}, so no answer is preferred. Remove this "
            "record."
        )
    order = sorted(range(len(scores)), key=lambda number: scores[number])
    pair = {"chosen": answers[order[-1]], "rejected": answers[order[0]]}
    margin = {"margin": scores[order[-1]] - scores[order[0]]}
    return _read_pair({**values, **pair, **margin}, location, shared)


def _read_marked(
    values: Mapping[str, Any], mark: str, location: str, shared: Any
) -> PreferenceExample:
    """Build an example from an answer that is labeled good (true) or bad (false)."""
    label = values[mark]
    if not isinstance(label, bool) and label not in (0, 1):
        raise DataError(f"{location}: {mark}={label!r} must be true or false. Correct the record.")
    answer: Any = values.get("completion", values.get("output"))
    prompt = _read_prompt(values, location)
    if answer is None and isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        prompt, answer = prompt[:-1], [prompt[-1]]  # the whole conversation is in 'messages'
    elif answer is not None:
        answer = _read_content(answer, location, "completion")
    if answer is None or prompt is None or not prompt:
        raise DataError(
            f"{location}: a labeled answer needs 'prompt' and 'completion'. Add the missing field."
        )
    if isinstance(answer, list) and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(answer, str) and isinstance(prompt, list):
        answer = [_answer(answer)]
    if isinstance(answer, str):
        _refuse_system(values, location)
    _check_answer(answer, location)
    return PreferenceExample(
        location, prompt, answer if label else None, None if label else answer, **shared
    )

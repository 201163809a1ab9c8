"""Builds CPM-Bee documents for its tasks, and finds constraints on their answers.

The functions build documents in the formats that CPM-Bee's README lists; using them is optional.
`find_constraints` detects if the answer of a document must be one of a few texts, so that decoding
can be constrained.

Source of the formats: README of OpenBMB/CPM-Bee.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from bmforge.errors import DataError
from bmforge.tokenizers.cpm_bee.segments import ANSWER_KEY, MAX_NESTING

__all__ = [
    "answer_question",
    "choose_option",
    "extract_entities",
    "fill_blanks",
    "find_constraints",
    "generate_text",
    "rate_text",
    "translate_text",
]

Document = dict[str, Any]

_BLANK = re.compile(r"<mask(?:_\d+)?>")
_OPTION = re.compile(r"<option_\d+>")
_RANGE = re.compile(r"[(（]\s*(\d{1,3})\s*[-–—~～到至]\s*(\d{1,3})\s*[)）]")
_ASKING_KEYS = ("question", "prompt")
_MOST_RATINGS = 11


def generate_text(text: str, prompt: str = "往后写两句话", answer: str = "") -> Document:
    """Build a document for continuing `text`, in which ``<mask>`` may mark where to continue."""
    return {"input": text, "prompt": prompt, ANSWER_KEY: answer}


def translate_text(text: str, prompt: str = "中翻英", answer: str = "") -> Document:
    """Build a translation document; `prompt` is 中翻英 (into English) or 英翻中 (into Chinese)."""
    return {"input": text, "prompt": prompt, ANSWER_KEY: answer}


def rate_text(
    text: str, question: str = "评分是多少？", lowest: int = 1, highest: int = 5, answer: str = ""
) -> Document:
    """Build a document whose answer is a rating of `text` between `lowest` and `highest`.

    Raises:
        DataError: the range does not have 2 to 11 ratings, or `answer` is outside of the range.
    """
    if not (0 <= lowest < highest < lowest + _MOST_RATINGS):
        raise DataError(
            f"lowest={lowest} and highest={highest} must give 2 to {_MOST_RATINGS} ratings, "
            "starting at 0 or above."
        )
    _check_answer(answer, [str(rating) for rating in range(lowest, highest + 1)])
    return {"input": text, "question": f"{question}({lowest}-{highest})", ANSWER_KEY: answer}


def choose_option(
    text: str, options: Sequence[str], question: str, answer: int | None = None
) -> Document:
    """Build a multiple-choice document; `answer` is the index of the correct option.

    Raises:
        DataError: there are fewer than two options, or `answer` is not the index of an option.
    """
    if len(options) < 2 or isinstance(options, str):
        raise DataError(f"options={options!r} must contain at least two strings.")
    names = [f"<option_{i}>" for i in range(len(options))]
    if answer is not None and not 0 <= answer < len(names):
        raise DataError(
            f"answer={answer} is not the index of an option (allowed: 0 to {len(names) - 1})."
        )
    return {
        "input": text,
        "options": dict(zip(names, options, strict=True)),
        "question": question,
        ANSWER_KEY: "" if answer is None else names[answer],
    }


def fill_blanks(text: str, answers: Mapping[str, str] | None = None) -> Document:
    """Build a document for filling the blanks ``<mask_0>``, ``<mask_1>``, ... in `text`.

    Raises:
        DataError: `text` has no blanks, or the keys of `answers` are not its blanks.
    """
    blanks = list(dict.fromkeys(_BLANK.findall(text.replace("<<", ""))))
    if not blanks:
        raise DataError(
            f"the text {text[:40]!r} has no blank. Write <mask_0> at the position of the answer."
        )
    if answers is not None and set(answers) != set(blanks):
        raise DataError(
            f"answers has the keys {sorted(answers)}, but the text has the blanks {blanks}. Pass "
            "one answer per blank."
        )
    return {"input": text, ANSWER_KEY: {blank: (answers or {}).get(blank, "") for blank in blanks}}


def answer_question(text: str, question: str, answer: str = "") -> Document:
    """Build a document with a question about `text`."""
    return {"input": text, "question": question, ANSWER_KEY: answer}


def extract_entities(
    text: str, kinds: Sequence[str], answers: Mapping[str, str] | None = None
) -> Document:
    """Build an entity extraction document, with one answer per kind of entity.

    Raises:
        DataError: `kinds` is empty, or the keys of `answers` are not `kinds`.
    """
    if not kinds or isinstance(kinds, str):
        raise DataError(f"kinds={kinds!r} must contain at least one entity type.")
    if answers is not None and set(answers) != set(kinds):
        raise DataError(
            f"answers has the keys {sorted(answers)}, but kinds is {list(kinds)}. Use the same "
            "names in both."
        )
    return {"input": text, ANSWER_KEY: {kind: (answers or {}).get(kind, "") for kind in kinds}}


def find_constraints(document: Mapping[str, Any]) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Return a dict from slot path to allowed answers; empty if unconstrained.

    Only documents with a single answer are constrained. If exactly one dict has the keys
    ``<option_0>``, ``<option_1>``, ..., its keys are allowed; without such a dict, the ratings in a
    range that ``question`` or ``prompt`` contains in parentheses, such as (1-5).
    """
    if isinstance(document.get(ANSWER_KEY), Mapping):
        return {}
    choices = _find_options({k: v for k, v in document.items() if k != ANSWER_KEY})
    if choices:
        return {(): choices[0]} if len(choices) == 1 else {}
    for key in _ASKING_KEYS:
        question = document.get(key)
        ranges = _RANGE.findall(question) if isinstance(question, str) else []
        if len(ranges) == 1:
            lowest, highest = map(int, ranges[0])
            if lowest < highest < lowest + _MOST_RATINGS:
                return {(): tuple(str(rating) for rating in range(lowest, highest + 1))}
    return {}


def _find_options(data: Any, depth: int = 0) -> list[tuple[str, ...]]:
    """Return the keys of each nested dict whose keys are all options."""
    if not isinstance(data, Mapping) or depth > MAX_NESTING:
        return []
    if data and all(isinstance(key, str) and _OPTION.fullmatch(key) for key in data):
        return [tuple(data)]
    return [keys for value in data.values() for keys in _find_options(value, depth + 1)]


def _check_answer(answer: str, allowed: Sequence[str]) -> None:
    if answer and answer not in allowed:
        raise DataError(f"answer={answer!r} is not one of {', '.join(allowed)}.")

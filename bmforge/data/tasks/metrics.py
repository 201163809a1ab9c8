"""How well a task was done: accuracy, F1 and exact match, by the definitions of its benchmark.

All are fractions from 0 to 1. F1 of classes is scikit-learn's, in the extra ``tasks``.
Source: the evaluation scripts of SQuAD 1.1 and ReCoRD; SuperGLUE's table of metrics.
"""

from __future__ import annotations

import re
import string
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from bmforge.data.tasks import TaskExample
from bmforge.errors import ConfigError, MissingDependencyError, ShapeError

__all__ = [
    "accuracy",
    "answer_scores",
    "class_f1",
    "multirc_scores",
    "normalize_answer",
    "score_task",
    "token_f1",
]

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def accuracy(predicted: Sequence[Any], wanted: Sequence[Any]) -> float:
    """Return which part of the predictions is right."""
    _check_pairs(predicted, wanted)
    return sum(p == w for p, w in zip(predicted, wanted, strict=True)) / len(wanted)


def class_f1(predicted: Sequence[int], wanted: Sequence[int], average: str = "macro") -> float:
    """Return F1 of classes.

    Args:
        predicted: one class for every example.
        wanted: what would have been right.
        average: "macro" is the mean over the classes that occur, "micro" counts over all of them
            together, "binary" is that of class 1.

    Raises:
        MissingDependencyError: scikit-learn is not installed.
    """
    _check_pairs(predicted, wanted)
    try:
        from sklearn.metrics import f1_score
    except ImportError as error:
        raise MissingDependencyError("scikit-learn", "tasks", "F1 of classes") from error
    return float(f1_score(list(wanted), list(predicted), average=average, zero_division=0.0))


def multirc_scores(
    predicted: Sequence[int], wanted: Sequence[int], questions: Sequence[Hashable]
) -> dict[str, float]:
    """Return MultiRC's two figures of answers judged right or not.

    Args:
        predicted: 0 or 1 for every answer.
        wanted: what would have been right.
        questions: the question that each answer belongs to.

    Returns:
        `f1a`, F1 over all answers; `em`, the part of the questions with every answer judged right.
    """
    _check_pairs(predicted, wanted)
    _check_pairs(questions, wanted)
    whole: dict[Hashable, bool] = defaultdict(lambda: True)
    for question, p, w in zip(questions, predicted, wanted, strict=True):
        whole[question] &= p == w
    f1a = class_f1(predicted, wanted, "binary")
    return {"f1a": f1a, "em": sum(whole.values()) / len(whole)}


def normalize_answer(text: str) -> str:
    """Return an English answer in small letters, without punctuation, articles and extra spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def token_f1(predicted: str, answer: str) -> float:
    """Return F1 of the words of two answers after `normalize_answer`."""
    mine, right = normalize_answer(predicted).split(), normalize_answer(answer).split()
    shared = (Counter(mine) & Counter(right)).total()
    return 2 * shared / (len(mine) + len(right)) if shared else 0.0


def answer_scores(predicted: Sequence[str], answers: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return `f1` and `em` of answers as texts, each against the accepted one nearest to it.

    Raises:
        ShapeError: numbers differ, or a question has no accepted answer.
    """
    _check_pairs(predicted, answers)
    if not all(answers):
        raise ShapeError("every question needs at least one accepted answer to be scored.")
    pairs = list(zip(predicted, answers, strict=True))
    f1 = sum(max(token_f1(text, right) for right in accepted) for text, accepted in pairs)
    em = sum(
        normalize_answer(text) in {normalize_answer(right) for right in accepted}
        for text, accepted in pairs
    )
    return {"f1": f1 / len(pairs), "em": em / len(pairs)}


def score_task(
    name: str, predicted: Sequence[Any], examples: Sequence[TaskExample]
) -> dict[str, float]:
    """Return the figures by which a task is ranked.

    Args:
        name: of the task, as in `TASKS`.
        predicted: for every example the label's number, or a text where one is wanted.
        examples: with their labels.

    Raises:
        ConfigError: labels are kept secret.
        ShapeError: not one prediction for every example.
    """
    if any(example.label is None for example in examples):
        raise ConfigError(f"these examples of {name} have no labels; score another split.")
    score = _SCORES.get(name, _score_labels)
    return score(predicted, examples)


def _score_labels(predicted: Sequence[Any], examples: Sequence[TaskExample]) -> dict[str, float]:
    return {"accuracy": accuracy(predicted, [example.label for example in examples])}


def _score_cb(predicted: Sequence[Any], examples: Sequence[TaskExample]) -> dict[str, float]:
    wanted = [int(example.label or 0) for example in examples]
    return {"accuracy": accuracy(predicted, wanted), "f1": class_f1(predicted, wanted)}


def _score_multirc(predicted: Sequence[Any], examples: Sequence[TaskExample]) -> dict[str, float]:
    questions = [e.idx[:2] if isinstance(e.idx, tuple) else e.idx for e in examples]
    return multirc_scores(predicted, [int(e.label or 0) for e in examples], questions)


def _score_answers(predicted: Sequence[Any], examples: Sequence[TaskExample]) -> dict[str, float]:
    return answer_scores(predicted, [example.answers for example in examples])


_SCORES: Mapping[str, Callable[[Sequence[Any], Sequence[TaskExample]], dict[str, float]]] = {
    "CB": _score_cb,
    "MultiRC": _score_multirc,
    "ReCoRD": _score_answers,
    "SQuAD": _score_answers,
}


def _check_pairs(predicted: Sequence[Any], wanted: Sequence[Any]) -> None:
    """Raise `ShapeError` where there is not one prediction for every label, or none at all."""
    if len(predicted) != len(wanted) or not wanted:
        raise ShapeError(
            f"{len(predicted)} predictions for {len(wanted)} examples; needed is one for each, and "
            "at least one."
        )

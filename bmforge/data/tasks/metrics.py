"""Task metrics (accuracy, F1, exact match, BLEU) as the benchmarks define them.

All are fractions from 0 to 1. The F1 of classification uses scikit-learn (extra ``tasks``).
Source: the evaluation scripts of SQuAD 1.1, ReCoRD and TACRED; SuperGLUE's table of metrics;
Papineni et al., "BLEU" (2002); for loose F1 Ling and Weld, "Fine-grained entity
recognition" (2012).
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from bmforge.data.tasks import TASKS, TaskExample
from bmforge.errors import ConfigError, MissingDependencyError, ShapeError

__all__ = [
    "accuracy",
    "answer_scores",
    "class_f1",
    "corpus_bleu",
    "loose_f1",
    "multirc_scores",
    "n_grams",
    "normalize_answer",
    "relation_scores",
    "score_task",
    "split_words",
    "token_f1",
]

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_WORDS = re.compile(r"\w+|[^\w\s]")
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def accuracy(predicted: Sequence[Any], labels: Sequence[Any]) -> float:
    """Return the fraction of correct predictions."""
    _check_pairs(predicted, labels)
    return sum(p == w for p, w in zip(predicted, labels, strict=True)) / len(labels)


def class_f1(predicted: Sequence[int], labels: Sequence[int], average: str = "macro") -> float:
    """Return the F1 score of a classification.

    Args:
        predicted: predicted class of each example.
        labels: true class of each example.
        average: "macro" for the mean over the classes that occur, "micro" for all classes pooled,
            "binary" for class 1.

    Raises:
        MissingDependencyError: scikit-learn is not installed.
    """
    _check_pairs(predicted, labels)
    try:
        from sklearn.metrics import f1_score
    except ImportError as error:
        raise MissingDependencyError("scikit-learn", "tasks", f"the {average} F1 score") from error
    return float(f1_score(list(labels), list(predicted), average=average, zero_division=0.0))


def multirc_scores(
    predicted: Sequence[int], labels: Sequence[int], questions: Sequence[Hashable]
) -> dict[str, float]:
    """Return MultiRC's two metrics, f1a and em, for binary judgments of answers.

    Args:
        predicted: 0 or 1 for each answer.
        labels: true value for each answer.
        questions: question id of each answer.

    Returns:
        `f1a`, F1 over all answers; `em`, the fraction of questions whose answers are all judged
        correctly.
    """
    _check_pairs(predicted, labels)
    _check_pairs(questions, labels)
    all_right: dict[Hashable, bool] = defaultdict(lambda: True)
    for question, p, w in zip(questions, predicted, labels, strict=True):
        all_right[question] &= p == w
    f1a = class_f1(predicted, labels, "binary")
    return {"f1a": f1a, "em": sum(all_right.values()) / len(all_right)}


def normalize_answer(text: str) -> str:
    """Normalize an English answer: lower case, no punctuation, articles or extra spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def token_f1(predicted: str, answer: str) -> float:
    """Return the word-level F1 of two answers after `normalize_answer`."""
    words, right = normalize_answer(predicted).split(), normalize_answer(answer).split()
    shared = (Counter(words) & Counter(right)).total()
    return 2 * shared / (len(words) + len(right)) if shared else 0.0


def answer_scores(predicted: Sequence[str], answers: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return the F1 and exact match (`em`) of text answers.

    An answer is compared with every accepted answer, and its best score is used.

    Raises:
        ShapeError: the lengths differ, or a question has no accepted answer.
    """
    _check_pairs(predicted, answers)
    if not all(answers):
        raise ShapeError("answers must contain at least one accepted answer for every question.")
    pairs = list(zip(predicted, answers, strict=True))
    f1 = sum(max(token_f1(text, right) for right in accepted) for text, accepted in pairs)
    em = sum(
        normalize_answer(text) in {normalize_answer(right) for right in accepted}
        for text, accepted in pairs
    )
    return {"f1": f1 / len(pairs), "em": em / len(pairs)}


def relation_scores(
    predicted: Sequence[int], labels: Sequence[int], none: int = 0
) -> dict[str, float]:
    """Return the micro-averaged precision, recall and F1 of relations.

    Args:
        predicted: predicted class of each example.
        labels: true class of each example.
        none: index of the class that means no relation.
    """
    _check_pairs(predicted, labels)
    right = sum(p == w != none for p, w in zip(predicted, labels, strict=True))
    num_predicted, num_labels = (
        sum(relation != none for relation in row) for row in (predicted, labels)
    )
    return {
        "precision": right / num_predicted if num_predicted else 0.0,
        "recall": right / num_labels if num_labels else 0.0,
        "f1": 2 * right / (num_predicted + num_labels) if right else 0.0,
    }


def loose_f1(predicted: Sequence[str], labels: Sequence[str], sep: str = "-") -> dict[str, float]:
    """Return micro and macro F1 of hierarchical types: `person-actor` also counts as `person`.

    Args:
        predicted: predicted type name of each example.
        labels: true type name of each example.
        sep: separator of the levels in a type name.
    """
    _check_pairs(predicted, labels)

    def ancestor_types(name: str) -> set[str]:
        parts = name.split(sep)
        return {sep.join(parts[:count]) for count in range(1, len(parts) + 1)}

    pairs = [(ancestor_types(p), ancestor_types(w)) for p, w in zip(predicted, labels, strict=True)]
    right = sum(len(p & w) for p, w in pairs)
    micro = 2 * right / sum(len(p) + len(w) for p, w in pairs)
    precision = sum(len(p & w) / len(p) for p, w in pairs) / len(pairs)
    recall = sum(len(p & w) / len(w) for p, w in pairs) / len(pairs)
    macro = 2 * precision * recall / (precision + recall) if right else 0.0
    return {"loose micro f1": micro, "loose macro f1": macro}


def corpus_bleu(
    predicted: Sequence[str], answers: Sequence[Sequence[str]], longest: int = 4
) -> float:
    """Return the corpus BLEU of lowercased texts; punctuation marks count as words.

    Args:
        predicted: text for each example.
        answers: reference texts for each example.
        longest: largest n-gram size.

    Raises:
        ShapeError: the lengths differ, or an example has no reference.
    """
    _check_pairs(predicted, answers)
    if not all(answers):
        raise ShapeError("answers must contain at least one reference text for every example.")
    right, total = [0] * longest, [0] * longest
    length = nearest = 0
    for text, accepted in zip(predicted, answers, strict=True):
        words = split_words(text)
        references = [split_words(answer) for answer in accepted]
        length += len(words)
        nearest += min(map(len, references), key=lambda size: (abs(size - len(words)), size))
        for n in range(1, longest + 1):
            reference_counts: Counter[tuple[str, ...]] = Counter()
            for other in references:
                reference_counts |= n_grams(other, n)
            counts = n_grams(words, n)
            right[n - 1] += (counts & reference_counts).total()
            total[n - 1] += counts.total()
    if not all(right):
        return 0.0
    mean = sum(math.log(r / t) for r, t in zip(right, total, strict=True)) / longest
    return math.exp(mean + min(0.0, 1 - nearest / length))


def split_words(text: str) -> list[str]:
    """Return the lowercased words and punctuation marks of a text."""
    return _WORDS.findall(text.lower())


def n_grams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    """Count the occurrences of each n-gram of words."""
    return Counter(tuple(words[at : at + n]) for at in range(len(words) - n + 1))


def score_task(
    name: str, predicted: Sequence[Any], examples: Sequence[TaskExample]
) -> dict[str, float]:
    """Compute the official metrics of a task.

    Args:
        name: name of the task, as in `TASKS`.
        predicted: predicted label index, or text, of each example.
        examples: examples with labels.

    Raises:
        ConfigError: the examples have no labels.
        ShapeError: the number of predictions differs from the number of examples.
    """
    if any(example.label is None for example in examples):
        raise ConfigError(
            f"the split of {name} has examples without labels. Evaluate another split."
        )
    score = _SCORES.get(name, _score_labels)
    return score(predicted, examples)


def _score_labels(predicted: Sequence[Any], examples: Sequence[TaskExample]) -> dict[str, float]:
    return {"accuracy": accuracy(predicted, [example.label for example in examples])}


def _score_cb(predicted: Sequence[Any], examples: Sequence[TaskExample]) -> dict[str, float]:
    labels = [int(example.label or 0) for example in examples]
    return {"accuracy": accuracy(predicted, labels), "f1": class_f1(predicted, labels)}


def _score_multirc(predicted: Sequence[Any], examples: Sequence[TaskExample]) -> dict[str, float]:
    questions = [e.idx[:2] if isinstance(e.idx, tuple) else e.idx for e in examples]
    return multirc_scores(predicted, [int(e.label or 0) for e in examples], questions)


def _score_answers(predicted: Sequence[Any], examples: Sequence[TaskExample]) -> dict[str, float]:
    return answer_scores(predicted, [example.answers for example in examples])


def _score_relations(predicted: Sequence[Any], examples: Sequence[TaskExample]) -> dict[str, float]:
    return relation_scores(predicted, [int(example.label or 0) for example in examples])


def _score_types(predicted: Sequence[Any], examples: Sequence[TaskExample]) -> dict[str, float]:
    names = TASKS["Few-NERD"].label_names
    labels = [int(example.label or 0) for example in examples]
    names_predicted = [names[number] if number >= 0 else "" for number in predicted]
    exact = {"accuracy": accuracy(predicted, labels)}
    return exact | loose_f1(names_predicted, [names[number] for number in labels])


def _score_facts(predicted: Sequence[Any], examples: Sequence[TaskExample]) -> dict[str, float]:
    return {"p@1": accuracy(predicted, [example.label for example in examples])}


def _score_texts(predicted: Sequence[Any], examples: Sequence[TaskExample]) -> dict[str, float]:
    return {"bleu": corpus_bleu(predicted, [example.answers for example in examples])}


_SCORES: Mapping[str, Callable[[Sequence[Any], Sequence[TaskExample]], dict[str, float]]] = {
    "CB": _score_cb,
    "MultiRC": _score_multirc,
    "ReCoRD": _score_answers,
    "SQuAD": _score_answers,
    "TACRED": _score_relations,
    "Re-TACRED": _score_relations,
    "Few-NERD": _score_types,
    "LAMA": _score_facts,
    "WebNLG": _score_texts,
}


def _check_pairs(predicted: Sequence[Any], labels: Sequence[Any]) -> None:
    """Raise `ShapeError` if there are no examples, or not as many predictions as examples."""
    if len(predicted) != len(labels) or not labels:
        raise ShapeError(
            f"there are {len(predicted)} predictions for {len(labels)} examples (needed: one "
            "prediction per example, and at least one example)."
        )

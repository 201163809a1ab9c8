"""OpenPrompt's metrics for classification and generation, and CrossFit's metrics for answers.

CrossFit's `evaluate` (Ye et al. 2021) scores the text that a model generated for any task. Of
CrossFit's metrics, only ROUGE-L is missing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from bmforge.data.tasks import metrics
from bmforge.errors import ConfigError

__all__ = ["classification_metrics", "evaluate", "generation_metric"]

_AVERAGES = {"micro-f1": "micro", "macro-f1": "macro"}
_BLEU_SIZES = 4


def classification_metrics(
    preds: Sequence[int],
    labels: Sequence[int],
    metric: str = "micro-f1",
    id2label: Mapping[int, str] | None = None,
    label_path_sep: str = "-",
) -> float:
    """Return one classification metric, from 0 to 1.

    Args:
        preds: predicted class of each example.
        labels: true class of each example.
        metric: "micro-f1", "macro-f1", "accuracy", "precision" and "recall" (of class 1),
            "loose-micro-f1" or "loose-macro-f1".
        id2label: dict from class index to name, for the loose metrics.
        label_path_sep: separator of a name's levels, for the loose metrics.

    Raises:
        ConfigError: the metric is unknown, or a loose metric lacks `id2label`.
    """
    if metric in _AVERAGES:
        return metrics.class_f1(preds, labels, _AVERAGES[metric])
    if metric == "accuracy":
        return metrics.accuracy(preds, labels)
    if metric in ("precision", "recall"):
        others = labels if metric == "recall" else preds
        both = sum(p == w == 1 for p, w in zip(preds, labels, strict=True))
        return both / max(1, sum(other == 1 for other in others))
    if metric in ("loose-micro-f1", "loose-macro-f1"):
        if id2label is None:
            raise ConfigError(f"metric={metric!r} needs the name of each class. Pass id2label.")
        names = [[id2label[number] for number in row] for row in (preds, labels)]
        return metrics.loose_f1(names[0], names[1], label_path_sep)[metric.replace("-", " ")]
    names_of_metrics = (
        "micro-f1, macro-f1, accuracy, precision, recall, loose-micro-f1, loose-macro-f1"
    )
    raise ConfigError(f"unknown metric: metric={metric!r} (supported: {names_of_metrics}).")


def generation_metric(
    hypos: Sequence[str], refs: Sequence[str], metric: str = "sentence_bleu"
) -> float:
    """Return the mean sentence BLEU of generated texts.

    Precisions of zero are smoothed by the length of the text (Chen and Cherry 2014, method 4).
    Words are split by a regular expression; the original downloads NLTK's tokenizer.

    Args:
        hypos: generated text of each example.
        refs: references of each example, separated by line ends.
        metric: must be "sentence_bleu".

    Raises:
        ConfigError: the metric is unknown, or the numbers of texts differ.
    """
    if metric != "sentence_bleu":
        raise ConfigError(f"unknown metric: metric={metric!r} (supported: sentence_bleu).")
    if len(hypos) != len(refs) or not hypos:
        raise ConfigError(
            f"there are {len(hypos)} texts, but {len(refs)} references. Pass one reference per "
            "text."
        )
    scores = [
        _sentence_bleu(metrics.split_words(hypo), [metrics.split_words(r) for r in ref.split("\n")])
        for hypo, ref in zip(hypos, refs, strict=True)
    ]
    return sum(scores) / len(scores)


def _sentence_bleu(words: list[str], references: list[list[str]]) -> float:
    """Return the BLEU of one text, with smoothing method 4 of Chen and Cherry (2014)."""
    if not words:
        return 0.0
    total, misses = 0.0, 0
    for size in range(1, _BLEU_SIZES + 1):
        allowed: Counter[tuple[str, ...]] = Counter()
        for reference in references:
            allowed |= metrics.n_grams(reference, size)
        grams = metrics.n_grams(words, size)
        hits, count = (grams & allowed).total(), max(1, grams.total())
        if size == 1 and not hits:
            return 0.0
        precision = hits / count
        if not hits:
            # The k-th n-gram size without a match counts as ln(length) / (2^k * 5) matches.
            misses += 1
            if len(words) == 1:
                return 0.0
            precision = math.log(len(words)) / (2**misses * 5) / count
        total += math.log(precision) / _BLEU_SIZES
    nearest = min(map(len, references), key=lambda length: (abs(length - len(words)), length))
    return math.exp(total + min(0.0, 1 - nearest / len(words)))


def evaluate(predictions: Sequence[str], data: Sequence[Any], metric: str, **kwargs: Any) -> float:
    """Return CrossFit's score for generated answers.

    Args:
        predictions: generated text of each example.
        data: accepted answer, or list of accepted answers, of each example.
        metric: "EM", "ACC", "QA-F1" or "Classification-F1".
        kwargs: `only_compare_prefix=True` truncates each text to the answer's length, for ACC.

    Raises:
        ConfigError: the metric or an argument is unknown.
    """
    prefix = kwargs.pop("only_compare_prefix", False)
    if kwargs:
        raise ConfigError(
            f"unknown arguments: {', '.join(kwargs)} (supported: only_compare_prefix)."
        )
    answers = [row if isinstance(row, list) else [row] for row in data]
    if metric in ("EM", "QA-F1"):
        return metrics.answer_scores(predictions, answers)["em" if metric == "EM" else "f1"]
    if metric == "ACC":
        hits = [
            any((text[: len(a)] if prefix else text).lower() == a.lower() for a in accepted)
            for text, accepted in zip(predictions, answers, strict=True)
        ]
        return sum(hits) / len(hits)
    if metric == "Classification-F1":
        names = sorted({*predictions, *data})
        numbers = {name: number for number, name in enumerate(names)}
        return metrics.class_f1([numbers[p] for p in predictions], [numbers[d] for d in data])
    raise ConfigError(
        f"unknown metric: metric={metric!r} (supported: EM, ACC, QA-F1, Classification-F1)."
    )

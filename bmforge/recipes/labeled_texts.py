"""Reads labeled texts for the quality classifier, and measures the trained classifier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from bmforge.data import normalize_text
from bmforge.data.sources.conversations import find_conversation_files, read_records
from bmforge.errors import DataError
from bmforge.settings import QualityConfig

__all__ = ["HeldOutScore", "hold_out", "measure_scores", "read_labeled"]

_DIGEST = 16**12


@dataclass(frozen=True)
class HeldOutScore:
    """Quality of a classifier on held-out texts.

    Args:
        good, bad: number of held-out texts with each label.
        auc: probability that a good text has a higher score than a bad one; ties count half.
        precision: fraction of good texts among those with a score of at least 0.5.
        recall: fraction of the good texts that have a score of at least 0.5.
    """

    good: int
    bad: int
    auc: float
    precision: float
    recall: float

    def __str__(self) -> str:
        """Format the scores as one line for the log."""
        return (
            f"on {self.good} good and {self.bad} other held-out texts: AUC {self.auc:.3f}; at a "
            f"score of 0.5 precision {self.precision:.3f}, recall {self.recall:.3f}"
        )


def read_labeled(config: QualityConfig) -> tuple[list[str], list[str]]:
    """Read files with one labeled record per line; return the good texts and the other texts.

    Args:
        config: config with the `labeled` files, and the fields and values of their labels.

    Raises:
        DataError: a record lacks its text or label, a label is not a number although
            `good_from` is given, or all texts are in the same class.
    """
    sides: tuple[list[str], list[str]] = ([], [])
    labels: Counter[str] = Counter()
    for text, label, is_good in _read(config):
        labels[str(label)] += 1
        sides[0 if is_good else 1].append(text)
    if not all(sides):
        rule = f"{config.label_field}={'|'.join(config.good_labels)}"
        rule = rule if config.good_from is None else f"{config.label_field}>={config.good_from:g}"
        counts = ", ".join(f"{label!r} ({count})" for label, count in labels.most_common(10))
        raise DataError(
            f"{'no' if not sides[0] else 'every'} text counts as good ({rule}), but training "
            f"needs good and bad texts. The files have the labels: {counts or 'none'}. Pass the "
            "labels of good texts with --good-labels, or set --good-from."
        )
    return sides


def _read(config: QualityConfig) -> Iterator[tuple[str, object, bool]]:
    """Yield (text, label, is_good); `is_good` is True if the label means high quality."""
    for path in config.labeled:
        for file in find_conversation_files(path):
            for location, record in read_records(file):
                text, label = _fields(location, record, config)
                if config.good_from is not None and not _is_number(label):
                    raise DataError(
                        f"{location}: {config.label_field}={label!r} is not a number, but "
                        "--good-from compares numbers. Pass the labels of good texts with "
                        "--good-labels."
                    )
                if config.good_from is not None:
                    is_good = float(str(label)) >= config.good_from
                else:
                    is_good = str(label) in config.good_labels
                if text := normalize_text(text):
                    yield text, label, is_good


def _fields(location: str, record: object, config: QualityConfig) -> tuple[str, object]:
    fields = record if isinstance(record, dict) else {}
    for name in (config.text_field, config.label_field):
        if name not in fields:
            raise DataError(
                f"{location} has no field {name!r} (fields: "
                f"{', '.join(fields) or 'none'}). Set the fields with --text-field and "
                "--label-field."
            )
    text = fields[config.text_field]
    if not isinstance(text, str):
        raise DataError(
            f"{location}: {config.text_field}={text!r:.80} is not a string. Set the text field "
            "with --text-field."
        )
    return text, fields[config.label_field]


def _is_number(label: object) -> bool:
    try:
        float(str(label))
    except ValueError:
        return False
    return not isinstance(label, bool)


def hold_out(texts: Sequence[str], share: float, seed: int) -> tuple[list[str], list[str]]:
    """Divide texts by a hash into training texts and held-out texts.

    Equal texts are in the same split, and adding texts moves no other text to the other split.
    """
    sides: tuple[list[str], list[str]] = ([], [])
    for text in texts:
        digest = blake2b(f"{seed} held out {text}".encode(), digest_size=6).hexdigest()
        sides[int(digest, 16) < share * _DIGEST].append(text)
    return sides


def measure_scores(good: Sequence[float], bad: Sequence[float]) -> HeldOutScore:
    """Return AUC, precision and recall of the scores of held-out texts."""
    ranked = np.sort(np.asarray(bad, dtype=np.float64))
    below = np.searchsorted(ranked, good, side="left")
    ties = np.searchsorted(ranked, good, side="right") - below
    auc = float((below + ties / 2).mean() / len(bad))
    right, wrong = sum(s >= 0.5 for s in good), sum(s >= 0.5 for s in bad)
    precision = right / (right + wrong) if right + wrong else 0.0
    return HeldOutScore(len(good), len(bad), auc, precision, right / len(good))

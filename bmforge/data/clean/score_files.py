"""Scores documents with the model files that `bmforge data quality` writes.

Options have forms such as ``quality.npz>=0.5`` or ``perplexity.npz=head``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

import numpy as np

from bmforge.data.clean.drop import Drop
from bmforge.data.clean.scores import (
    BUCKETS,
    LinearScorer,
    Perplexity,
    Scorer,
    ScoreText,
)
from bmforge.data.sources.document import Document
from bmforge.errors import ConfigError, DataError, suggest

__all__ = ["ScoreByFile", "load_scorer", "read_score", "save_perplexity"]

_FORM = re.compile(r"(.+?)(?:(>=|<=|=)([^=<>]+))?")


def save_perplexity(path: Path, model: Perplexity, bounds: tuple[float, float]) -> None:
    """Write a perplexity model and its bucket bounds to an .npz file."""
    with path.open("wb") as file:
        np.savez_compressed(
            file,
            counts=model.counts,
            total=np.float64(model.total),
            vocabulary=np.int64(model.vocabulary),
            bounds=np.array(bounds, dtype=np.float64),
        )


def load_scorer(path: Path) -> tuple[Scorer, tuple[float, float] | None]:
    """Load a classifier, or a perplexity model with its bucket bounds, from an .npz file.

    Raises:
        DataError: the file is missing, or neither a classifier nor a perplexity model.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            if "counts" in file:
                low, high = file["bounds"].tolist()
                model = Perplexity(file["counts"], float(file["total"]), int(file["vocabulary"]))
                return model, (low, high)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{str(path)!r} is not a scoring model ({error}). Pass a file that "
            "`bmforge data quality` wrote."
        ) from error
    return LinearScorer.load(path), None


@dataclass(frozen=True)
class ScoreByFile:
    """A step that stores a model's score in the document, and drops documents out of bounds.

    Each worker process loads the model file itself.

    Attributes:
        path: path of the model file.
        digest: hash of the file when the `prepare` run started.
        low, high: bounds of the scores to keep; None for no bound.
    """

    path: str
    digest: str
    low: float | None = None
    high: float | None = None

    @property
    def version(self) -> str:
        """Version of the step: a string that changes whenever its results may change."""
        return f"score=1 {Path(self.path).stem} {self.low} {self.high} {self.digest}"

    def __call__(self, document: Document) -> Document | Drop:
        """Return the document with its score, or a `Drop` if the score is out of bounds."""
        scorer = _open(self.path, self.digest)
        return ScoreText(Path(self.path).stem, scorer, self.low, self.high)(document)


@lru_cache(maxsize=4)
def _open(path: str, digest: str) -> Scorer:
    if _digest(path) != digest:
        raise DataError(f"scores={path!r} changed while it was being read. Run the command again.")
    return load_scorer(Path(path))[0]


def _digest(path: str) -> str:
    try:
        return blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()
    except OSError as error:
        raise ConfigError(
            f"scores={path!r} cannot be read ({error.strerror}). Check the path."
        ) from error


def read_score(option: str) -> ScoreByFile:
    """Parse ``FILE``, ``FILE>=NUMBER``, ``FILE<=NUMBER`` or ``FILE=BUCKETS`` into a step.

    Raises:
        ConfigError: the string has a different form, or the file cannot be read.
        DataError: the file is not a scoring model.
    """
    match = _FORM.fullmatch(option)
    assert match is not None or not option
    if match is None:
        raise ConfigError(
            "scores contains an empty file name. Pass a file that `bmforge data quality` wrote."
        )
    path, sign, value = match.groups()
    digest, (_, bounds) = _digest(path), load_scorer(Path(path))
    if sign is None:
        return ScoreByFile(path, digest)
    if sign == "=":
        return ScoreByFile(path, digest, *_bucket_bounds(option, value.split(","), bounds))
    try:
        number = float(value)
    except ValueError:
        raise ConfigError(
            f"the threshold {value!r} in scores={option!r} is not a number. Write for example "
            "FILE>=0.5."
        ) from None
    return ScoreByFile(path, digest, **{"low" if sign == ">=" else "high": number})


def _bucket_bounds(
    option: str, names: Sequence[str], bounds: tuple[float, float] | None
) -> tuple[float | None, float | None]:
    """Return the lower and upper perplexity bound of one bucket or of adjacent buckets."""
    if bounds is None:
        raise ConfigError(
            f"scores={option!r} selects a bucket, but the file is a classifier, which has no "
            "buckets. Write for example FILE>=0.5."
        )
    for name in names:
        if name not in BUCKETS:
            raise ConfigError(
                f"unknown bucket {name!r} in scores={option!r} (supported: "
                f"{', '.join(BUCKETS)}).{suggest(name, BUCKETS)}"
            )
    places = sorted({BUCKETS.index(name) for name in names})
    if places[-1] - places[0] >= len(places):
        raise ConfigError(
            f"the buckets in scores={option!r} are not adjacent (order: head, middle, tail). "
            "Select one bucket, or adjacent buckets."
        )
    edges = (None, *bounds, None)
    return edges[places[0]], edges[places[-1] + 1]

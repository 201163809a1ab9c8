"""Text scores: a linear classifier on hashed n-grams, and the perplexity of a trigram model.

Both models are trained on texts in seconds. Any other model can be used as a function that returns
a number for each text. As in CCNet, the bounds of the perplexity buckets split a sample of texts
into thirds.
Source: Wenzek et al. 2020, arXiv:1911.00359 (perplexity, thirds); Jelinek and Mercer 1980.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bmforge.data.clean.drop import Drop, cut_excerpt
from bmforge.data.dedup.tokens import hash_runs, hash_tokens, split_tokens
from bmforge.data.sources.document import Document
from bmforge.errors import ConfigError, DataError

__all__ = [
    "BUCKETS",
    "LinearScorer",
    "Perplexity",
    "ScoreText",
    "Scorer",
    "bucket_of",
    "find_buckets",
    "train_linear",
    "train_perplexity",
]

Scorer = Callable[[Sequence[str]], list[float]]
BUCKETS = ("head", "middle", "tail")  # the most probable texts first
_WEIGHTS = (0.1, 0.3, 0.6)  # interpolation weights of unigrams, bigrams and trigrams
_RATE = 0.5


def _features(text: str, size: int) -> NDArray[np.int64]:
    """Return the distinct hashes of a text's unigrams and bigrams, in the range 0 to `size` - 1."""
    tokens = hash_tokens(split_tokens(text))
    both = np.concatenate((hash_runs(tokens, 1), hash_runs(tokens, 2)))
    return np.unique(both % np.uint64(size)).astype(np.int64)


@dataclass(frozen=True)
class LinearScorer:
    """Logistic regression that scores texts: near 1 for high quality, near 0 for low quality.

    Shape: weights (size,).
    """

    weights: NDArray[np.float32]
    bias: float

    def __call__(self, texts: Sequence[str]) -> list[float]:
        """Return the probability of high quality for each text."""
        return [self._score(_features(text, len(self.weights))) for text in texts]

    def _score(self, features: NDArray[np.int64]) -> float:
        total = self.weights[features].sum() / max(len(features), 1) ** 0.5
        return float(1 / (1 + np.exp(-np.clip(total + self.bias, -50, 50))))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the classifier to an .npz file."""
        np.savez_compressed(Path(path), weights=self.weights, bias=np.float64(self.bias))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> LinearScorer:
        """Load a classifier from a file that `save` wrote.

        Raises:
            DataError: the file is missing or not a classifier.
        """
        try:
            with np.load(Path(path), allow_pickle=False) as file:
                return LinearScorer(file["weights"], float(file["bias"]))
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"{str(path)!r} is not a classifier file ({error}). Pass a file that "
                "LinearScorer.save wrote."
            ) from error


def train_linear(
    good: Iterable[str],
    bad: Iterable[str],
    *,
    size: int = 1 << 18,
    epochs: int = 5,
    seed: int = 0,
) -> LinearScorer:
    """Train a quality classifier by stochastic gradient descent; both classes have equal weight.

    Args:
        good: texts of high quality (positive examples).
        bad: texts of low quality (negative examples).
        size: number of weights; features with the same hash share a weight.
        epochs: passes over the texts.
        seed: random seed of the order of the texts.

    Raises:
        ConfigError: no texts of high quality or no texts of low quality are given.
    """
    sides = [[_features(text, size) for text in texts] for texts in (bad, good)]
    if not all(sides):
        raise ConfigError(
            "the training texts have only one class (needed: at least one good and one bad text)."
        )
    rows = [(row, label) for label, side in enumerate(sides) for row in side]
    share = [len(rows) / (2 * len(side)) for side in sides]
    scorer = LinearScorer(np.zeros(size, np.float32), 0.0)
    bias, draw = 0.0, np.random.default_rng(seed)
    for epoch in range(epochs):
        rate = _RATE / (1 + epoch)
        for index in draw.permutation(len(rows)):
            row, label = rows[index]
            scorer = LinearScorer(scorer.weights, bias)
            step = rate * share[label] * (label - scorer._score(row))
            scorer.weights[row] += np.float32(step / max(len(row), 1) ** 0.5)
            bias += 0.1 * step
    return LinearScorer(scorer.weights, bias)


@dataclass(frozen=True)
class Perplexity:
    """Trigram language model that computes the perplexity of texts.

    The model counts hashed n-grams (n = 1 to 3) of words, or of Chinese characters.

    Shape: counts (3, size). Hash collisions add up, so probabilities are slightly too large.
    """

    counts: NDArray[np.float32]
    total: float
    vocabulary: int

    def __call__(self, texts: Sequence[str]) -> list[float]:
        """Return each text's perplexity per word; infinite for a text without words."""
        return [self._one(text) for text in texts]

    def _one(self, text: str) -> float:
        singles, two, three = _hashed_runs(text, self.counts.shape[1])
        if not len(singles):
            return float("inf")
        ones, twos, threes = self.counts[0][singles], self.counts[1][two], self.counts[2][three]
        chance = _WEIGHTS[0] * (ones.astype(np.float64) + 1) / (self.total + self.vocabulary)
        chance[1:] += _WEIGHTS[1] * twos / np.maximum(ones[:-1], 1)
        chance[2:] += _WEIGHTS[2] * threes / np.maximum(twos[:-1], 1)
        return float(np.exp(-np.log(chance).mean()))


def _hashed_runs(text: str, size: int) -> list[NDArray[np.int64]]:
    tokens = hash_tokens(split_tokens(text))
    return [(hash_runs(tokens, n) % np.uint64(size)).astype(np.int64) for n in (1, 2, 3)]


def train_perplexity(texts: Iterable[str], *, size: int = 1 << 20) -> Perplexity:
    """Train a trigram model on texts of high quality.

    Args:
        texts: training texts.
        size: number of hash buckets for each n.

    Memory: 12 bytes per hash bucket.

    Raises:
        ConfigError: the texts have no words.
    """
    counts, total = np.zeros((3, size), np.float32), 0
    for text in texts:
        for n, runs in enumerate(_hashed_runs(text, size)):
            np.add.at(counts[n], runs, 1)
            total += len(runs) if n == 0 else 0
    if not total:
        raise ConfigError("the texts contain no words (needed: at least one text with words).")
    return Perplexity(counts, float(total), int(np.count_nonzero(counts[0])))


def find_buckets(perplexities: Iterable[float]) -> tuple[float, float]:
    """Return the two bounds that divide perplexities into thirds.

    Raises:
        ConfigError: there are fewer than three finite perplexities.
    """
    finite = [value for value in perplexities if np.isfinite(value)]
    if len(finite) < 3:
        raise ConfigError(
            f"only {len(finite)} texts have a finite perplexity (needed: at least 3, for three "
            "buckets). Pass more texts."
        )
    low, high = np.quantile(finite, (1 / 3, 2 / 3))
    return float(low), float(high)


def bucket_of(perplexity: float, bounds: tuple[float, float]) -> str:
    """Return the bucket of a perplexity: ``"head"``, ``"middle"`` or ``"tail"``."""
    return BUCKETS[sum(perplexity > bound for bound in bounds)]


@dataclass(frozen=True)
class ScoreText:
    """A step that stores a score in the document and drops documents outside its bounds.

    Attributes:
        name: key of the score in `Document.scores`.
        scorer: function that returns a score for each text of a list.
        low, high: bounds of the scores to keep; None for no bound.
    """

    name: str
    scorer: Scorer
    low: float | None = None
    high: float | None = None

    def __call__(self, document: Document) -> Document | Drop:
        """Return the document with its score, or a `Drop` if the score is out of bounds."""
        [value] = self.scorer([document.text])
        for bound, broken in (
            (self.low, self.low is not None and not value >= self.low),
            (self.high, self.high is not None and not value <= self.high),
        ):
            if broken:
                return Drop(f"score.{self.name}", value, bound, cut_excerpt(document.text))
        return replace(document, scores={**document.scores, self.name: value})

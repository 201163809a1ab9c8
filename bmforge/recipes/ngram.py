"""Unigram and bigram models of a training split, as baselines for a trained model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bmforge.data import TokenStore

__all__ = ["bigram_bits", "unigram_bits"]

_DISCOUNT = 0.75


def _unigram(train: NDArray[np.integer], vocab_size: int) -> NDArray[np.float64]:
    """Return the add-one estimate of every token's probability."""
    counts = np.bincount(train, minlength=vocab_size).astype(np.float64) + 1.0
    return counts / counts.sum()


def unigram_bits(train: TokenStore, held_out: TokenStore, vocab_size: int) -> float:
    """Return the code length of the held-out tokens in bits under add-one unigram counts."""
    probability = _unigram(np.asarray(train.tokens), vocab_size)
    return float(-np.log2(probability[np.asarray(held_out.tokens)[1:]]).sum())


def bigram_bits(train: TokenStore, held_out: TokenStore, vocab_size: int) -> float:
    """Return the code length of the held-out tokens in bits under a bigram model.

    Absolute discounting with back-off to the unigram: P(b|a) = max(c(ab) - d, 0) / c(a) + d n(a) /
    c(a) P(b), with counts c, discount d, and n(a) distinct tokens that follow a (Ney, Essen and
    Kneser 1994).
    """
    unigram = _unigram(np.asarray(train.tokens), vocab_size)
    tokens = np.asarray(train.tokens).astype(np.int64)
    pairs, counts = np.unique(tokens[:-1] * vocab_size + tokens[1:], return_counts=True)
    seen = np.bincount(tokens[:-1], minlength=vocab_size)
    kinds = np.bincount(pairs // vocab_size, minlength=vocab_size)
    stream = np.asarray(held_out.tokens).astype(np.int64)
    before, after = stream[:-1], stream[1:]
    key = before * vocab_size + after
    index = np.minimum(np.searchsorted(pairs, key), len(pairs) - 1)
    count = np.where(pairs[index] == key, counts[index], 0)
    total = np.maximum(seen[before], 1)
    discounted = np.maximum(count - _DISCOUNT, 0) / total
    left = np.where(seen[before] > 0, _DISCOUNT * kinds[before] / total, 1.0)
    return float(-np.log2(discounted + left * unigram[after]).sum())

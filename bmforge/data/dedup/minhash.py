"""MinHash with banding: similar texts most likely have an equal key in at least one band.

Source: Broder 1997 (MinHash); the permutations ``(a x + b) mod (2^61 - 1)`` on 64-bit words are
those of datasketch and datatrove, so that equal n-gram hashes give equal clusters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from bmforge.data.dedup.tokens import Hashes, hash_runs, hash_tokens, split_tokens, splitmix64
from bmforge.errors import ConfigError

__all__ = ["DedupConfig", "MinHasher", "choose_bands", "hash_shingles", "jaccard"]

_PRIME = (1 << 61) - 1
_BLOCK = 256  # n-grams hashed at a time; 112 hashes of each take 0.2 MB, which fits in a cache
_MARGIN = 0.05  # pairs this far above the threshold must almost all be found
_RECALL = 0.985


@dataclass(frozen=True)
class DedupConfig:
    """Settings of near-duplicate detection.

    Attributes:
        threshold: minimum Jaccard similarity of two texts' n-gram sets for them to be duplicates.
        ngram: number of words, or Chinese characters, in an n-gram.
        hashes: number of MinHash permutations; divided into bands by `choose_bands`.
        seed: random seed of the permutations.
        verify: True to compare candidates exactly; False to treat all texts that share a band key
            as duplicates.
        source_order: source prefixes, highest priority first; among duplicates the document whose
            source has the highest priority is kept. Ties are decided by the longer text, then the
            smaller hash of the text, then of the id.

    Raises:
        ConfigError: a value is out of range.
    """

    threshold: float = 0.8
    ngram: int = 5
    hashes: int = 112
    seed: int = 1
    verify: bool = True
    source_order: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        """Raise `ConfigError` if a setting is out of range."""
        if not 0.3 <= self.threshold <= 1:
            raise ConfigError(f"threshold={self.threshold} must be from 0.3 to 1.")
        if self.ngram < 1 or self.hashes < 1:
            raise ConfigError(
                f"ngram={self.ngram} and hashes={self.hashes} must both be at least 1."
            )

    @property
    def version(self) -> str:
        """Version of the detection: a string that changes whenever its results may change."""
        return f"near=2 {self!r}"


def choose_bands(threshold: float, hashes: int) -> tuple[int, int]:
    """Return the number of bands and the hashes per band for a similarity threshold.

    Chooses the longest band that finds 98.5 % of the pairs with a similarity 0.05 above the
    threshold, or else one hash per band. Longer bands give fewer false candidates.
    """
    similar = min(threshold + _MARGIN, 1.0)
    for rows in range(hashes, 1, -1):
        if 1 - (1 - similar**rows) ** (hashes // rows) >= _RECALL:
            return hashes // rows, rows
    return hashes, 1


def hash_shingles(text: str, ngram: int) -> Hashes:
    """Return the sorted distinct hashes of a text's n-grams.

    A text with fewer than `ngram` words has a single, shorter n-gram; one without words has none.
    """
    return np.unique(_hash_ngrams(text, ngram))


def _hash_ngrams(text: str, ngram: int) -> Hashes:
    """Return the hashes of a text's n-grams, in text order, including repeated ones."""
    tokens = hash_tokens(split_tokens(text))
    return hash_runs(tokens, min(ngram, len(tokens)) or 1)


def jaccard(first: Hashes, second: Hashes) -> float:
    """Return the Jaccard similarity of two sorted sets of hashes; 0 if both are empty."""
    common = np.intersect1d(first, second, assume_unique=True).size
    return common / max(first.size + second.size - common, 1)


class MinHasher:
    """Computes the MinHash signatures and band keys of documents.

    Args:
        config: number of hashes, threshold and seed.
        shingle: function that returns the n-gram hashes of a text (default: `hash_shingles`).

    Attributes:
        ngrams: function that returns the n-gram hashes of a text in any order, for `sketch`.
    """

    def __init__(self, config: DedupConfig, shingle: Callable[[str], Hashes] | None = None) -> None:
        self.config = config
        self.shingle = shingle or (lambda text: hash_shingles(text, config.ngram))
        # A signature does not depend on the order of the n-grams, so they need not be sorted.
        self.ngrams = shingle or (lambda text: _hash_ngrams(text, config.ngram))
        self.bands, self.rows = choose_bands(config.threshold, config.hashes)
        draw = np.random.RandomState(config.seed)
        size = self.bands * self.rows
        # Always sample `hashes` permutations, so that the number of bands does not change them.
        self._a = draw.randint(1, _PRIME, dtype=np.uint64, size=config.hashes)[:size, None]
        self._b = draw.randint(0, _PRIME, dtype=np.uint64, size=config.hashes)[:size, None]
        # Buffers of `_hash_block`: new arrays of this size would take longer than the arithmetic.
        self._values, self._upper = np.empty((2, size, _BLOCK), np.uint64)

    def sign(self, shingles: Hashes) -> Hashes:
        """Return the MinHash signature of a document: the smallest hash under each permutation.

        Shape: `shingles` (N,), N at least 1; returned (bands * rows,).
        """
        signature: Hashes = self.sign_all([shingles])[0]
        return signature

    def sign_all(self, documents: Sequence[Hashes]) -> Hashes:
        """Return the MinHash signatures of documents, hashing the n-grams of several at a time.

        Shape: each document (N,), N at least 1; returned (documents, bands * rows).
        """
        smallest = np.full((len(documents), self._a.shape[0]), _PRIME, np.uint64)
        starts = np.cumsum([0, *map(len, documents)])
        shingles = np.concatenate(documents) if len(documents) > 1 else documents[0]
        for begin in range(0, len(shingles), _BLOCK):
            values = self._hash_block(shingles[begin : begin + _BLOCK])
            first = int(starts.searchsorted(begin, "right")) - 1
            last = int(starts.searchsorted(begin + values.shape[1], "left"))
            inside = np.maximum(starts[first:last] - begin, 0)
            least = np.minimum.reduceat(values, inside, axis=1).T
            np.minimum(smallest[first:last], least, out=smallest[first:last])
        return smallest

    def _hash_block(self, shingles: Hashes) -> Hashes:
        """Return the hashes of n-grams under each permutation: (bands * rows, N).

        The array is overwritten by the next call.
        """
        prime = np.uint64(_PRIME)
        values, upper = self._values[:, : len(shingles)], self._upper[:, : len(shingles)]
        np.multiply(self._a, shingles, out=values)
        values += self._b
        # The remainder by 2^61 - 1 of a 64-bit number; the upper three bits are added below.
        np.right_shift(values, np.uint64(61), out=upper)
        values &= prime
        values += upper
        # For values below the prime the subtraction wraps around.
        np.subtract(values, prime, out=upper)
        return np.minimum(values, upper, out=values)

    def sketch(self, shingles: Hashes) -> Hashes:
        """Return one key per band; documents with an equal key are candidate duplicates.

        Shape: returned (bands,).
        """
        keys: Hashes = self.sketch_all([shingles])[0]
        return keys

    def sketch_all(self, documents: Sequence[Hashes]) -> Hashes:
        """Return the band keys of documents.

        Shape: each document (N,), N at least 1; returned (documents, bands).
        """
        rows = self.sign_all(documents).reshape(-1, self.bands, self.rows)
        keys = np.zeros(rows.shape[:2], np.uint64)
        for column in range(self.rows):
            keys = splitmix64(keys * np.uint64(0x9E3779B97F4A7C15) + rows[:, :, column])
        return keys

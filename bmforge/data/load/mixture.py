"""Mixes weighted corpora so that every range of samples contains each corpus in proportion.

The corpus of global sample n is read from a periodic table, which is computed once by Tijdeman's
rule: among the corpora that are not ahead of their proportion, take the one with the earliest
deadline. After any n samples, the number of samples from a corpus differs from its proportion of n
by less than one.
Source: R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from bmforge.data.load.packing import PackedDataset
from bmforge.errors import ConfigError

__all__ = ["Mixture", "assign_sources", "integer_shares"]

_LONGEST_PERIOD = 1 << 16


class Mixture:
    """Mixes packed corpora in fixed proportions; a corpus starts again when it is exhausted.

    Args:
        parts: dict from name to (dataset, weight); weights are relative. All datasets have the same
            seq_len and eos_id.

    Attributes:
        shares: dict from name to the number of samples per period, the exact proportions.

    Raises:
        ConfigError: there is no dataset, a weight is not above 0, or the datasets' settings differ.
    """

    def __init__(self, parts: Mapping[str, tuple[PackedDataset, float]]) -> None:
        if not parts:
            raise ConfigError("parts={} of Mixture must contain at least one corpus.")
        self.names = sorted(parts)
        self._datasets = [_named(parts[name][0], name) for name in self.names]
        first = self._datasets[0]
        self.seq_len, self.eos_id = first.seq_len, first.eos_id
        for name, dataset in zip(self.names, self._datasets, strict=True):
            if (dataset.seq_len, dataset.eos_id) != (self.seq_len, self.eos_id):
                raise ConfigError(
                    f"corpus {name!r} of the mixture has seq_len={dataset.seq_len} and "
                    f"eos_id={dataset.eos_id}, but corpus {self.names[0]!r} has "
                    f"seq_len={self.seq_len} and eos_id={self.eos_id}. Use the same values for all "
                    "corpora."
                )
        counts = integer_shares({name: parts[name][1] for name in self.names})
        self.shares = dict(zip(self.names, counts, strict=True))
        self._counts = np.array(counts, dtype=np.int64)
        self._sources = assign_sources(counts)
        self._ranks = np.empty(len(self._sources), dtype=np.int64)
        for i, count in enumerate(counts):
            self._ranks[self._sources == i] = np.arange(count)

    def source_of(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the corpus index, and the sample index in that corpus, of each global sample."""
        periods, at = np.divmod(numbers, len(self._sources))
        sources = self._sources[at]
        return sources, periods * self._counts[sources] + self._ranks[at]

    def check_trainable(self) -> None:
        """Raise DataError if one of the corpora is shorter than one sequence."""
        for dataset in self._datasets:
            dataset.check_trainable()

    def training_rows(self, numbers: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
        """Return the token sequences of the samples with global indices `numbers`.

        Shape: numbers (B,), result (B, T)
        """
        rows = np.empty((len(numbers), self.seq_len), dtype=np.int64)
        sources, own = self.source_of(numbers)
        for i in np.unique(sources).tolist():
            of_source = sources == i
            rows[of_source] = self._datasets[i].training_rows(own[of_source], seed)
        return rows

    def num_held_out_rows(self) -> int:
        """Return the number of sequences in one epoch of every corpus; weights do not matter."""
        return sum(dataset.num_held_out_rows() for dataset in self._datasets)

    def held_out_rows(
        self, numbers: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return validation sequences and their lengths; the corpora follow one another, by name.

        Shape: numbers (B,), rows (B, T), lengths (B,)
        """
        rows = np.zeros((len(numbers), self.seq_len), dtype=np.int64)
        lengths = np.zeros(len(numbers), dtype=np.int64)
        first = 0
        for dataset in self._datasets:
            last = first + dataset.num_held_out_rows()
            of_dataset = (numbers >= first) & (numbers < last)
            rows[of_dataset], lengths[of_dataset] = dataset.held_out_rows(
                numbers[of_dataset] - first
            )
            first = last
        return rows, lengths

    def fingerprint(self) -> int:
        """Return a 63-bit hash of the corpora and proportions, which determine the order."""
        return _hash(([d.fingerprint() for d in self._datasets], self.shares))

    def content(self) -> int:
        """Return a 63-bit hash of the text in all corpora."""
        return _hash([d.content() for d in self._datasets])


def integer_shares(weights: Mapping[str, float]) -> list[int]:
    """Convert weights to the smallest integers in the same proportion.

    If their sum would exceed 65536 (weights such as pi), they are rounded to a sum of 65536.

    Raises:
        ConfigError: a weight is not a finite number above 0, or is rounded to zero.
    """
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight > 0):
            raise ConfigError(f"weight={weight} of corpus {name!r} must be above 0 and finite.")
    exact = [Fraction(str(float(weight))) for weight in weights.values()]
    total = sum(exact)
    shares = [weight / total for weight in exact]
    simple = [share.limit_denominator(10_000) for share in shares]
    close = all(abs(a - b) < Fraction(1, 10**12) for a, b in zip(shares, simple, strict=True))
    if close and sum(simple) == 1:
        shares = simple
    period = math.lcm(*[share.denominator for share in shares])
    if period > _LONGEST_PERIOD:
        period = _LONGEST_PERIOD
        counts = _round_to_sum(shares, period)
    else:
        counts = [int(share * period) for share in shares]
    for (name, weight), count in zip(weights.items(), counts, strict=True):
        if count == 0:
            raise ConfigError(
                f"weight={weight} of corpus {name!r} is below 1/{period} of the total weight. "
                "Raise the weight, or remove the corpus."
            )
    return counts


def assign_sources(counts: Sequence[int]) -> NDArray[np.int64]:
    """Return one period of corpus indices, in which corpus i appears ``counts[i]`` times.

    In each prefix of the period, the count of a corpus differs from its proportion by at most 1.
    """
    period, kinds = sum(counts), len(counts)
    chosen = np.zeros(period, dtype=np.int64)
    if kinds == 1:
        return chosen
    # Tijdeman's slack is 1 / (2k - 2), so all values times (2k - 2) * period are integers.
    scale = 2 * kinds - 2
    had = [0] * kinds
    for n in range(1, period + 1):
        best, best_due = -1, 0
        for i, count in enumerate(counts):
            owed = scale * (count * n - had[i] * period)
            if owed < period:
                continue
            due = (scale - 1) * period - owed  # the deadline is due / count
            if best < 0 or due * counts[best] < best_due * count:
                best, best_due = i, due
        had[best] += 1
        chosen[n - 1] = best
    return chosen


def _round_to_sum(shares: Sequence[Fraction], total: int) -> list[int]:
    """Round shares * total to integers with the sum `total`, by the largest-remainder method."""
    counts = [int(share * total) for share in shares]
    order = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i] * total)
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts


def _hash(value: object) -> int:
    return int.from_bytes(blake2b(repr(value).encode(), digest_size=8).digest(), "little") >> 1


def _named(dataset: PackedDataset, name: str) -> PackedDataset:
    return PackedDataset(dataset.store, dataset.seq_len, dataset.eos_id, name)

"""Finds the repeated word n-grams of a text for Gopher's repetition filters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate

__all__ = ["RepeatedNgrams", "TopNgrams"]

_PREFIX = 12  # characters; most n-grams of five words are longer
_SHORTEST = 5  # words; longer n-grams are searched at the positions found for this length


class TopNgrams:
    """Finds the most frequent n-gram of a list of words, for several n.

    Only n-grams that begin with a repeated shorter n-gram and end with a repeated word are counted,
    as no other n-gram can occur twice.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        counts = Counter(words)
        self._is_repeated = [count > 1 for count in map(counts.__getitem__, words)]
        # For each n that was searched, the positions where repeated n-grams begin.
        self._positions = {
            1: [position for position, is_repeated in enumerate(self._is_repeated) if is_repeated]
        }

    def top(self, n: int) -> tuple[Sequence[str], int]:
        """Return the most frequent n-gram (the first of equally frequent ones) and its count.

        `n` is from 2 to the number of words.
        """
        words, is_repeated = self._words, self._is_repeated
        last_position = len(words) - n
        positions = self._positions[max(length for length in self._positions if length < n)]
        positions = [
            position
            for position in positions
            if position <= last_position and is_repeated[position + n - 1]
        ]
        grams = [tuple(words[i : i + n]) for i in positions]
        counts = Counter(grams)
        times = max(counts.values(), default=1)
        if times == 1:
            self._positions[n] = []
            return words[:n], 1
        self._positions[n] = [
            position for position, gram in zip(positions, grams, strict=True) if counts[gram] > 1
        ]
        return next(gram for gram, count in counts.items() if count == times), times


class RepeatedNgrams:
    """Measures how much of a list of words repeats earlier n-grams, for several n.

    N-grams are compared as strings without spaces. For speed, an n-gram of more than 12 characters
    is compared only if its first 12 characters also occur at the start of another word.

    Args:
        words: words of the text, in order.
        joined: all words without spaces.
    """

    def __init__(self, words: Sequence[str], joined: str) -> None:
        self._joined = joined
        self._starts = list(accumulate(map(len, words), initial=0))
        self._positions: dict[int, list[int]] = {}

    def repeated_characters(self, n: int) -> int:
        """Return the number of characters in n-grams that repeat an earlier one.

        After a repeated n-gram, the search continues at its end, so that n-grams do not overlap.
        """
        seen: set[str] = set()
        starts, joined = self._starts, self._joined
        repeated = next_position = 0
        last_position = len(starts) - 1 - n
        for position in self._positions_of(min(n, _SHORTEST)):
            if position < next_position or position > last_position:
                continue
            gram = joined[starts[position] : starts[position + n]]
            if gram in seen:
                repeated, next_position = repeated + len(gram), position + n
            else:
                seen.add(gram)
        return repeated

    def _positions_of(self, n: int) -> list[int]:
        """Return the positions, in order, at which repeated n-grams can begin."""
        if n not in self._positions:
            starts, ends, joined = self._starts[:-n], self._starts[n:], self._joined
            prefixes = [joined[start : start + _PREFIX] for start in starts]
            # No prefix is shared in most short texts.
            is_shared = len(set(prefixes)) < len(prefixes)
            counts: Mapping[str, int] = Counter(prefixes) if is_shared else {}
            self._positions[n] = [
                position
                for position, (start, end) in enumerate(zip(starts, ends, strict=True))
                if end - start < _PREFIX or (is_shared and counts[prefixes[position]] > 1)
            ]
        return self._positions[n]

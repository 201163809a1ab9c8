"""Guessing tokens that repeat what was there before; the model checks several in one step.

What a step chooses for a guess is what it would have chosen without one: draws depend on the seed
and the position only, so that guesses change how soon tokens come and nothing else.

Source: Saxena, "Prompt lookup decoding" (2023); checking: Leviathan et al., "Fast inference from
transformers via speculative decoding" (2023).
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Lookup"]

# Tokens that must have been there before, and how many of those that followed are guessed.
_NGRAM, _MOST = 3, 6
# After so many guesses of which fewer than this share was right, none are made for a while.
_TRIED, _SHARE, _PAUSE = 16, 0.4, 64


class Lookup:
    """Guesses for one sequence, and whether they pay."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], int] = {}
        self._known = 0
        self._guessed = self._right = 0
        self._pause_until = 0

    def guess(self, tokens: Sequence[int]) -> list[int]:
        """Return what followed the last tokens when they were there before; often nothing."""
        self._read(tokens)
        if len(tokens) < max(_NGRAM, self._pause_until):
            return []
        place = self._places.get(tuple(tokens[-_NGRAM:]))
        return [] if place is None else list(tokens[place : place + _MOST])

    def learn(self, length: int, guessed: int, right: int) -> None:
        """Be told how many guesses were right, when a sequence has become so long."""
        self._guessed += guessed
        self._right += right
        if self._guessed >= _TRIED:
            if self._right < _SHARE * self._guessed:
                self._pause_until = length + _PAUSE
            self._guessed = self._right = 0

    def _read(self, tokens: Sequence[int]) -> None:
        """Note where every stretch of `_NGRAM` tokens ends, but the last: nothing follows it."""
        for end in range(max(_NGRAM, self._known), len(tokens)):
            self._places[tuple(tokens[end - _NGRAM : end])] = end
        self._known = max(self._known, len(tokens))

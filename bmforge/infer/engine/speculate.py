"""Guessing tokens that come next, whoever guesses; the model checks several in one step.

What a step chooses for a guess is what it would have chosen without one: draws depend on the seed
and the position only, so that guesses change how soon tokens come and nothing else.

Source: Saxena, "Prompt lookup decoding" (2023); checking: Leviathan et al., "Fast inference from
transformers via speculative decoding" (2023).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

__all__ = ["GUESSED_LATER", "DraftSpeculator", "NgramSpeculator"]

# Stands for a guess of a small model, which guesses for all sequences together.
GUESSED_LATER = -1

# Tokens that must have been there before, and how many of those that followed are guessed.
_NGRAM, _MOST = 3, 6
# Tokens that a small model writes ahead.
_AHEAD = 4
# After so many guesses of which fewer than this share was right, none are made for a while.
_TRIED, _SHARE, _PAUSE = 16, 0.4, 64


class _Guesses(ABC):
    """Guesses for one sequence, and whether they pay.

    Args:
        share: of the guesses that must be right.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._guessed = self._right = 0
        self._pause_until = 0

    @abstractmethod
    def guess(self, tokens: Sequence[int]) -> list[int]:
        """Return what may come next, `GUESSED_LATER` where that is still to be found out."""

    @abstractmethod
    def fresh(self) -> _Guesses:
        """Return the same for a sequence that goes on otherwise."""

    def learn(self, length: int, guessed: int, right: int) -> None:
        """Be told how many guesses were right, when a sequence has become so long."""
        self._guessed += guessed
        self._right += right
        if self._guessed >= _TRIED:
            if self._right < self._share * self._guessed:
                self._pause_until = length + _PAUSE
            self._guessed = self._right = 0


class DraftSpeculator(_Guesses):
    """Guesses that a small model makes; those of tokens that were there before come first.

    Args:
        cost: of a step of the small model, where one of the large is 1.
        lookup: what guesses by what was there before; None looks nothing up.
    """

    def __init__(self, cost: float, lookup: NgramSpeculator | None = None) -> None:
        super().__init__(min(1.0, _SHARE + cost))
        self._cost, self._lookup = cost, lookup
        self._looked_up = False

    def guess(self, tokens: Sequence[int]) -> list[int]:
        """Return what was there before, or places for the small model's guesses."""
        found = [] if self._lookup is None else self._lookup.guess(tokens)
        self._looked_up = bool(found)
        if found or len(tokens) < self._pause_until:
            return found
        return [GUESSED_LATER] * _AHEAD

    def fresh(self) -> DraftSpeculator:
        """Return the same for a sequence that goes on otherwise."""
        return DraftSpeculator(self._cost, None if self._lookup is None else NgramSpeculator())

    def learn(self, length: int, guessed: int, right: int) -> None:
        """Tell whoever guessed."""
        if self._looked_up and self._lookup is not None:
            self._lookup.learn(length, guessed, right)
        else:
            super().learn(length, guessed, right)


class NgramSpeculator(_Guesses):
    """Guesses that repeat what was there before."""

    def __init__(self) -> None:
        super().__init__(_SHARE)
        self._places: dict[tuple[int, ...], int] = {}
        self._known = 0

    def guess(self, tokens: Sequence[int]) -> list[int]:
        """Return what followed the last tokens when they were there before; often nothing."""
        self._read(tokens)
        if len(tokens) < max(_NGRAM, self._pause_until):
            return []
        place = self._places.get(tuple(tokens[-_NGRAM:]))
        return [] if place is None else list(tokens[place : place + _MOST])

    def fresh(self) -> NgramSpeculator:
        """Return the same for a sequence that goes on otherwise."""
        return NgramSpeculator()

    def _read(self, tokens: Sequence[int]) -> None:
        """Note where every stretch of `_NGRAM` tokens ends, but the last: nothing follows it."""
        for end in range(max(_NGRAM, self._known), len(tokens)):
            self._places[tuple(tokens[end - _NGRAM : end])] = end
        self._known = max(self._known, len(tokens))

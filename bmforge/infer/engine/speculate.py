"""Speculators, which propose draft tokens by n-gram lookup, or placeholders for a draft model.

Verified tokens equal those without speculation: sampling depends only on the seed and the position,
so draft tokens change only the speed.

Source: Saxena, "Prompt lookup decoding" (2023); verification: Leviathan et al., "Fast inference
from transformers via speculative decoding" (2023).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

__all__ = ["DRAFT_PLACEHOLDER", "DraftSpeculator", "NgramSpeculator"]

# Placeholder for a token of the draft model, which drafts for all sequences together.
DRAFT_PLACEHOLDER = -1

# N-gram length to match, and number of following tokens to propose.
_NGRAM, _MOST = 3, 6
# Number of tokens that the draft model proposes at a time.
_AHEAD = 4
# After this many proposals with a lower acceptance rate, speculation pauses.
_TRIED, _SHARE, _PAUSE = 16, 0.4, 64


class _Speculator(ABC):
    """Base class of a sequence's speculator, which pauses if few draft tokens are accepted.

    Args:
        share: minimum acceptance rate.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._guessed = self._right = 0
        self._pause_until = 0

    @abstractmethod
    def propose(self, tokens: Sequence[int]) -> list[int]:
        """Return draft tokens, or `DRAFT_PLACEHOLDER` placeholders for the draft model to fill."""

    @abstractmethod
    def fork(self) -> _Speculator:
        """Return a new speculator of the same kind for a forked sequence."""

    def record_acceptance(self, length: int, guessed: int, right: int) -> None:
        """Record the numbers of proposed and accepted draft tokens at a sequence length."""
        self._guessed += guessed
        self._right += right
        if self._guessed >= _TRIED:
            if self._right < self._share * self._guessed:
                self._pause_until = length + _PAUSE
            self._guessed = self._right = 0


class DraftSpeculator(_Speculator):
    """Speculator for a draft model; n-gram matches take precedence.

    Args:
        cost: cost of a draft model step, relative to a step of the target model.
        lookup: n-gram speculator; None if there is none.
    """

    def __init__(self, cost: float, lookup: NgramSpeculator | None = None) -> None:
        super().__init__(min(1.0, _SHARE + cost))
        self._cost, self._lookup = cost, lookup
        self._looked_up = False

    def propose(self, tokens: Sequence[int]) -> list[int]:
        """Return tokens of an n-gram match, or placeholders for the draft model to fill."""
        draft = [] if self._lookup is None else self._lookup.propose(tokens)
        self._looked_up = bool(draft)
        if draft or len(tokens) < self._pause_until:
            return draft
        return [DRAFT_PLACEHOLDER] * _AHEAD

    def fork(self) -> DraftSpeculator:
        """Return a new speculator of the same kind for a forked sequence."""
        return DraftSpeculator(self._cost, None if self._lookup is None else NgramSpeculator())

    def record_acceptance(self, length: int, guessed: int, right: int) -> None:
        """Record the counts in the speculator that proposed the tokens."""
        if self._looked_up and self._lookup is not None:
            self._lookup.record_acceptance(length, guessed, right)
        else:
            super().record_acceptance(length, guessed, right)


class NgramSpeculator(_Speculator):
    """Speculator that copies the continuation of an earlier occurrence of the last n-gram."""

    def __init__(self) -> None:
        super().__init__(_SHARE)
        self._places: dict[tuple[int, ...], int] = {}
        self._known = 0

    def propose(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens that followed the previous occurrence of the last n-gram, if any."""
        self._read(tokens)
        if len(tokens) < max(_NGRAM, self._pause_until):
            return []
        start = self._places.get(tuple(tokens[-_NGRAM:]))
        return [] if start is None else list(tokens[start : start + _MOST])

    def fork(self) -> NgramSpeculator:
        """Return a new speculator of the same kind for a forked sequence."""
        return NgramSpeculator()

    def _read(self, tokens: Sequence[int]) -> None:
        """Index the end of every n-gram except the last, which has no continuation yet."""
        for end in range(max(_NGRAM, self._known), len(tokens)):
            self._places[tuple(tokens[end - _NGRAM : end])] = end
        self._known = max(self._known, len(tokens))

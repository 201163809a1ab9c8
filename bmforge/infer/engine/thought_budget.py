"""Limits the length of a model's reasoning by forcing the tokens that end it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bmforge.errors import ConfigError

__all__ = ["ThoughtBudget"]


@dataclass(frozen=True)
class ThoughtBudget:
    """Limit on the reasoning at the start of an answer.

    Args:
        max_tokens: maximum number of tokens before the end of the reasoning.
        end: token ids of the text that ends the reasoning, such as ``</think>``.
        start: token ids of the text that begins the reasoning; empty if the prompt contains them.
    """

    max_tokens: int
    end: tuple[int, ...]
    start: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a limit below 1 or an empty end."""
        if self.max_tokens < 1 or not self.end:
            raise ConfigError(
                f"ThoughtBudget: max_tokens={self.max_tokens} must be at least 1, and "
                f"end={self.end} must contain at least one token."
            )

    def next_token(self, ids: Sequence[int]) -> int | None:
        """Return the token that must follow the given answer tokens; None if any token may."""
        limit, size = self.max_tokens, len(self.end)
        if len(ids) < limit or tuple(ids[: len(self.start)]) != self.start:
            return None
        starts = range(len(self.start), limit)
        if any(tuple(ids[at : at + size]) == self.end for at in starts):
            return None  # it ended by itself, possibly across the limit
        forced = len(ids) - limit
        return self.end[forced] if forced < size else None

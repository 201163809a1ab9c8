"""Reasoning at the start of an answer: its length limit, and constraints that begin after it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bmforge.errors import ConfigError
from bmforge.infer.engine.constraint import Matcher

__all__ = ["MatcherAfterReasoning", "ReasoningSpan"]


@dataclass(frozen=True)
class ReasoningSpan:
    """Delimiters of the reasoning at the start of an answer, and a limit on its length.

    Args:
        end: token ids of the text that ends the reasoning, such as ``</think>``.
        start: token ids of the text that begins the reasoning; empty if the prompt contains them.
        max_tokens: maximum number of tokens between `start` and `end`; None for no limit.
    """

    end: tuple[int, ...]
    start: tuple[int, ...] = ()
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a negative limit or an empty end."""
        if not self.end or (self.max_tokens is not None and self.max_tokens < 0):
            raise ConfigError(
                f"ReasoningSpan: max_tokens={self.max_tokens} must be at least 0, and "
                f"end={self.end} must contain at least one token."
            )

    def next_token(self, ids: Sequence[int]) -> int | None:
        """Return the token that must follow the given answer tokens; None if any token may."""
        if self.max_tokens is None or tuple(ids[: len(self.start)]) != self.start:
            return None
        limit = len(self.start) + self.max_tokens
        if len(ids) < limit:
            return None
        if self._find_end(ids[: limit + len(self.end) - 1]) is not None:
            return None  # it ended by itself, possibly across the limit
        forced = len(ids) - limit
        return self.end[forced] if forced < len(self.end) else None

    def count(self, ids: Sequence[int]) -> int:
        """Return the number of reasoning tokens in an answer, without the delimiters."""
        if tuple(ids[: len(self.start)]) != self.start:
            return 0
        end = self._find_end(ids)
        return (len(ids) if end is None else end) - len(self.start)

    def _find_end(self, ids: Sequence[int]) -> int | None:
        """Return the position of `end` in an answer; None if the reasoning has not ended."""
        at = len(self.start)
        try:
            while True:
                at = ids.index(self.end[0], at)
                if tuple(ids[at : at + len(self.end)]) == self.end:
                    return at
                at += 1
        except ValueError:
            return None


class MatcherAfterReasoning:
    """State of a constraint that applies to the text after the reasoning of one answer.

    If an answer does not begin with reasoning, the constraint applies from the first token. If the
    prompt has begun the reasoning, every answer begins with reasoning.

    Args:
        matcher: state of the constraint.
        span: delimiters of the reasoning.
        vocab_size: number of logits per position.
        ends: EOS tokens, which may not be generated within the reasoning.
    """

    def __init__(
        self, matcher: Matcher, span: ReasoningSpan, vocab_size: int, ends: Collection[int]
    ) -> None:
        self._matcher, self._span, self._vocab_size, self._ends = matcher, span, vocab_size, ends
        self._ids: list[int] = []
        self._has_begun = False  # True if the constraint applies to the next token

    def copy(self) -> MatcherAfterReasoning:
        """Return a matcher for another answer; call it before the first token."""
        return MatcherAfterReasoning(self._matcher.copy(), self._span, self._vocab_size, self._ends)

    def allowed(self) -> Tensor | None:
        """Return the mask of allowed next tokens, (V,); None if the answer is complete."""
        if self._has_begun:
            return self._matcher.allowed()
        start, size = self._span.start, len(self._ids)
        if size >= len(start):
            mask = torch.ones(self._vocab_size, dtype=torch.bool)
            mask[[id for id in self._ends if id < self._vocab_size]] = False
            return mask
        mask = torch.zeros(self._vocab_size, dtype=torch.bool)
        if size == 0 and (first := self._matcher.allowed()) is not None:
            mask |= first
        mask[start[size]] = True
        return mask

    def take(self, token: int) -> None:
        """Advance the state by one allowed token."""
        if self._has_begun or (not self._ids and self._starts_answer(token)):
            self._has_begun = True
            self._matcher.take(token)
            return
        self._ids.append(token)
        begin, end = len(self._span.start), self._span.end
        self._has_begun = tuple(self._ids[begin:][-len(end) :]) == end

    def _starts_answer(self, token: int) -> bool:
        """Return True if the first token belongs to an answer without reasoning."""
        if self._span.start[:1] != (token,):
            return bool(self._span.start)
        allowed = self._matcher.allowed()
        return allowed is not None and bool(allowed[token])

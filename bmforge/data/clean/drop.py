"""`Drop`: the reason why a document was removed (rule, value, limit, and an excerpt)."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EXCERPT_CHARACTERS", "Drop", "cut_excerpt"]

EXCERPT_CHARACTERS = 200


@dataclass(frozen=True)
class Drop:
    """Reason why a document was removed from the corpus.

    Attributes:
        rule: name of the violated rule, such as ``gopher_quality.too_short``.
        value: measured or detected value; None if the rule has no value.
        bound: limit that the value violated; None if the rule has no limit.
        excerpt: beginning of the text, or the passage that violates the rule.
    """

    rule: str
    value: float | str | None
    bound: float | str | None
    excerpt: str


def cut_excerpt(text: str, start: int = 0) -> str:
    """Return at most `EXCERPT_CHARACTERS` characters of `text` from `start` on."""
    return text[start : start + EXCERPT_CHARACTERS]

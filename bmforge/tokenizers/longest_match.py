"""Greedy longest match of text against a vocabulary, as in CPM-2, EVA, CPM-Ant and CPM-Bee.

From left to right, the longest token that starts at the current position is matched; a character at
which no token starts is unknown. An Aho-Corasick automaton in Rust (``ahocorasick_rs``) finds all
matches in one pass over the text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from bmforge.errors import ConfigError, MissingDependencyError

__all__ = ["LongestMatcher", "Match"]

_SURROGATE = re.compile("[\ud800-\udfff]")
_NONCHARACTER = "\U0010ffff"


class Match(NamedTuple):
    """Part of a text: a token and its id, or unknown characters with the id None."""

    text: str
    id: int | None


class LongestMatcher:
    """Splits text greedily into the longest tokens of a vocabulary; thread-safe.

    Args:
        vocabulary: mapping from token to id; the empty token is ignored.
        max_chars: maximum length of a token; longer tokens are ignored, as in the original.

    Raises:
        ConfigError: there are no tokens of an allowed length.
        MissingDependencyError: ``ahocorasick_rs`` is not installed.

    Memory: about 0.1 KB per token, outside of Python's heap.
    """

    def __init__(self, vocabulary: Mapping[str, int], max_chars: int | None = None) -> None:
        try:
            from ahocorasick_rs import AhoCorasick, MatchKind
        except ImportError as error:
            raise MissingDependencyError(
                "ahocorasick-rs", "zh", "longest-match tokenization"
            ) from error
        limit = max_chars or max(map(len, vocabulary), default=0)
        usable = {token: id for token, id in vocabulary.items() if 0 < len(token) <= limit}
        if not usable:
            raise ConfigError(
                f"none of the {len(vocabulary)} tokens of the vocabulary has between 1 and "
                f"max_chars={max_chars} characters. Pass the whole vocabulary."
            )
        self._tokens = list(usable)
        self._ids = list(usable.values())
        self._automaton = AhoCorasick(self._tokens, matchkind=MatchKind.LeftmostLongest)

    def match(self, text: str) -> list[Match]:
        """Split a text into consecutive parts that cover all of it.

        Adjacent unknown characters form one part.
        """
        stretches: list[Match] = []
        tokens, ids, at = self._tokens, self._ids, 0
        for number, start, end in self._find(text):
            if start != at:
                stretches.append(Match(text[at:start], None))
            stretches.append(Match(tokens[number], ids[number]))
            at = end
        if at != len(text):
            stretches.append(Match(text[at:], None))
        return stretches

    def encode(self, text: str, unknown_id: int) -> list[int]:
        """Return the ids of the tokens in a text, with `unknown_id` for each unknown character."""
        token_ids, at = self._ids, 0
        ids: list[int] = []
        for number, start, end in self._find(text):
            if start != at:
                ids.extend([unknown_id] * (start - at))
            ids.append(token_ids[number])
            at = end
        ids.extend([unknown_id] * (len(text) - at))
        return ids

    def _find(self, text: str) -> list[tuple[int, int, int]]:
        """Return (token index, start, end) of every match."""
        try:
            return self._automaton.find_matches_as_indexes(text)
        except UnicodeEncodeError:
            # No token contains a lone surrogate; a placeholder of equal length keeps the offsets.
            return self._automaton.find_matches_as_indexes(_SURROGATE.sub(_NONCHARACTER, text))

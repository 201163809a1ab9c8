"""Greedy longest match of text against a vocabulary, as CPM-2, EVA, CPM-Ant and CPM-Bee do it.

From the left, the longest piece that starts here is taken; a character at which no piece starts is
unknown. An Aho-Corasick automaton in Rust (``ahocorasick_rs``) finds that in one pass.
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
    """One stretch of the text: a piece with its id, or a run of unknown characters with id None."""

    text: str
    id: int | None


class LongestMatcher:
    """Cut text greedily into the longest pieces of a vocabulary; safe to share between threads.

    Args:
        vocabulary: piece -> id; the empty piece is left out.
        max_chars: pieces longer than this are left out, since the original never looks so far.

    Raises:
        ConfigError: no piece is left.
        MissingDependencyError: ``ahocorasick_rs`` is not installed.

    Memory: about 0.1 KB per piece, outside of Python's heap.
    """

    def __init__(self, vocabulary: Mapping[str, int], max_chars: int | None = None) -> None:
        try:
            from ahocorasick_rs import AhoCorasick, MatchKind
        except ImportError as error:
            raise MissingDependencyError("ahocorasick-rs", "zh", "Longest match") from error
        limit = max_chars or max(map(len, vocabulary), default=0)
        kept = {piece: id for piece, id in vocabulary.items() if 0 < len(piece) <= limit}
        if not kept:
            raise ConfigError(
                f"LongestMatcher: none of the {len(vocabulary)} pieces has between 1 and "
                f"max_chars={max_chars} characters; give the whole vocabulary"
            )
        self._pieces = list(kept)
        self._ids = list(kept.values())
        self._automaton = AhoCorasick(self._pieces, matchkind=MatchKind.LeftmostLongest)

    def match(self, text: str) -> list[Match]:
        """Return the stretches of `text` in order; joined they are `text` again.

        Neighbouring unknown characters come as one stretch.
        """
        stretches: list[Match] = []
        pieces, ids, at = self._pieces, self._ids, 0
        for number, start, end in self._find(text):
            if start != at:
                stretches.append(Match(text[at:start], None))
            stretches.append(Match(pieces[number], ids[number]))
            at = end
        if at != len(text):
            stretches.append(Match(text[at:], None))
        return stretches

    def encode(self, text: str, unknown_id: int) -> list[int]:
        """Return the ids of the pieces of `text`, with `unknown_id` for every unknown character."""
        known, at = self._ids, 0
        ids: list[int] = []
        for number, start, end in self._find(text):
            if start != at:
                ids.extend([unknown_id] * (start - at))
            ids.append(known[number])
            at = end
        ids.extend([unknown_id] * (len(text) - at))
        return ids

    def _find(self, text: str) -> list[tuple[int, int, int]]:
        """Return (piece number, first character, character after the last) of every match."""
        try:
            return self._automaton.find_matches_as_indexes(text)
        except UnicodeEncodeError:
            # A lone surrogate is no piece; a stand-in of the same length keeps the places.
            return self._automaton.find_matches_as_indexes(_SURROGATE.sub(_NONCHARACTER, text))

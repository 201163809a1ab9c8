"""Text statistics for the filter rules, computed on demand and cached."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TypeVar

from bmforge.data.clean.characters import HAN_RUN, SENTENCE_ENDS, SYMBOL_CHARACTERS
from bmforge.data.clean.words import WordSplitter, count_sentences, words_of

__all__ = ["TextStatistics", "find_repeated"]

Value = TypeVar("Value")

_PARAGRAPH_BREAK = re.compile("\n{2,}")
_LINE_BREAK = re.compile("\n+")


def find_repeated(parts: Sequence[str]) -> tuple[int, int]:
    """Return the number of strings that repeat an earlier one, and their number of characters."""
    if len(distinct := set(parts)) == len(parts):
        return 0, 0
    return len(parts) - len(distinct), sum(map(len, parts)) - sum(map(len, distinct))


class TextStatistics:
    """Statistics of one text, computed on first use and cached.

    Args:
        text: the text.
        split: function that splits the text, or a line, into words (default: the splitter for the
            text's script).
        count: function that counts the sentences of a line.
    """

    def __init__(
        self,
        text: str,
        split: WordSplitter = words_of,
        count: Callable[[str], int] | None = None,
    ) -> None:
        self.text = text
        self.split = split
        self.count_sentences = count or (lambda line: count_sentences(split(line)))
        self._found: dict[object, object] = {}

    def once(self, find: Callable[[TextStatistics], Value]) -> Value:
        """Return ``find(self)``, cached after the first call so that rules can share it."""
        if find not in self._found:
            self._found[find] = find(self)
        return self._found[find]  # type: ignore[return-value]

    @cached_property
    def words(self) -> list[str]:
        """Words and punctuation marks."""
        return self.split(self.text)

    @cached_property
    def real_words(self) -> list[str]:
        """Words that are not only punctuation."""
        return [word for word in self.words if word.strip(SYMBOL_CHARACTERS)]

    @cached_property
    def lines(self) -> list[str]:
        """Lines, divided at any Unicode line end."""
        return self.text.splitlines()

    @cached_property
    def filled_lines(self) -> list[str]:
        """Nonblank lines, divided at newlines only."""
        return [line for line in self.text.split("\n") if line.strip()]

    @cached_property
    def characters(self) -> int:
        """Number of characters that are not whitespace."""
        return sum(map(len, self.text.split()))

    @cached_property
    def han(self) -> int:
        """Number of Chinese characters."""
        return sum(map(len, HAN_RUN.findall(self.text)))

    @cached_property
    def repeated_paragraphs(self) -> tuple[float, float]:
        """Share of the paragraphs that are repeats, and share of the characters in them."""
        parts = _PARAGRAPH_BREAK.split(self.text.strip())
        number, characters = find_repeated(parts)
        return number / len(parts), characters / max(len(self.text), 1)

    @cached_property
    def repeated_lines(self) -> tuple[float, float]:
        """Share of the lines that are repeats, and share of the characters in them."""
        parts = _LINE_BREAK.split(self.text)
        number, characters = find_repeated(parts)
        return number / len(parts), characters / max(len(self.text), 1)

    def top_ngram_share(self, n: int) -> float:
        """Return the share of characters in the most frequent word n-gram, including spaces."""
        words = self.words
        if len(words) < n:
            return 0.0
        [(top, times)] = Counter(zip(*(words[i:] for i in range(n)), strict=False)).most_common(1)
        return (sum(map(len, top)) + n - 1) * times / len(self.text)

    @cached_property
    def _joined(self) -> tuple[str, list[int]]:
        """All words joined without spaces, and the offset of each word."""
        return "".join(self.words), list(accumulate(map(len, self.words), initial=0))

    def repeated_ngram_share(self, n: int) -> float:
        """Return the share of characters in word n-grams that repeat an earlier one.

        After a repeated n-gram the search continues behind its end, so that n-grams do not overlap.
        """
        joined, starts = self._joined
        runs = list(map(joined.__getitem__, map(slice, starts, starts[n:])))
        if len(seen := set(runs)) == len(runs):
            return 0.0
        seen.clear()
        repeated = at = 0
        while at < len(runs):
            if runs[at] in seen:
                repeated += len(runs[at])
                at += n
            else:
                seen.add(runs[at])
                at += 1
        return repeated / len(self.text)

    def ends_sentence_share(self) -> float:
        """Share of nonblank lines that end with a sentence-ending mark."""
        lines = self.filled_lines
        return sum(line.endswith(SENTENCE_ENDS) for line in lines) / max(len(lines), 1)

"""Computes the statistics of a text that filter rules use, each once and on demand."""

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
    """Return how many parts occurred before, and their characters."""
    if len(distinct := set(parts)) == len(parts):
        return 0, 0
    return len(parts) - len(distinct), sum(map(len, parts)) - sum(map(len, distinct))


class TextStatistics:
    """Figures of one text.

    Args:
        split: makes words of the text, and of a line for sentences; by default the splitter that
            fits the text.
        count: counts the sentences of a line.
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
        """Return ``find(self)``, worked out the first time only; for what several rules share."""
        if find not in self._found:
            self._found[find] = find(self)
        return self._found[find]  # type: ignore[return-value]

    @cached_property
    def words(self) -> list[str]:
        """Words and marks."""
        return self.split(self.text)

    @cached_property
    def real_words(self) -> list[str]:
        """Words that are more than marks."""
        return [word for word in self.words if word.strip(SYMBOL_CHARACTERS)]

    @cached_property
    def lines(self) -> list[str]:
        """Lines at any line end."""
        return self.text.splitlines()

    @cached_property
    def filled_lines(self) -> list[str]:
        """Lines that hold more than spaces, divided at newlines only."""
        return [line for line in self.text.split("\n") if line.strip()]

    @cached_property
    def characters(self) -> int:
        """Characters that are no space."""
        return sum(map(len, self.text.split()))

    @cached_property
    def han(self) -> int:
        """Chinese characters."""
        return sum(map(len, HAN_RUN.findall(self.text)))

    @cached_property
    def repeated_paragraphs(self) -> tuple[float, float]:
        """Share of paragraphs that occurred before: of their number, of the text's characters."""
        parts = _PARAGRAPH_BREAK.split(self.text.strip())
        number, characters = find_repeated(parts)
        return number / len(parts), characters / max(len(self.text), 1)

    @cached_property
    def repeated_lines(self) -> tuple[float, float]:
        """Share of lines that occurred before: of their number, of the text's characters."""
        parts = _LINE_BREAK.split(self.text)
        number, characters = find_repeated(parts)
        return number / len(parts), characters / max(len(self.text), 1)

    def top_ngram_share(self, n: int) -> float:
        """Share of the text's characters in its most frequent run of `n` words (spaces between)."""
        words = self.words
        if len(words) < n:
            return 0.0
        [(top, times)] = Counter(zip(*(words[i:] for i in range(n)), strict=False)).most_common(1)
        return (sum(map(len, top)) + n - 1) * times / len(self.text)

    @cached_property
    def _joined(self) -> tuple[str, list[int]]:
        """All words without spaces, and where each begins there."""
        return "".join(self.words), list(accumulate(map(len, self.words), initial=0))

    def repeated_ngram_share(self, n: int) -> float:
        """Share of the text's characters in runs of `n` words that occurred before.

        Behind a repeated run the search goes on after its end, so that runs do not overlap.
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
        """Share of filled lines that end as a sentence does."""
        lines = self.filled_lines
        return sum(line.endswith(SENTENCE_ENDS) for line in lines) / max(len(lines), 1)

"""Text statistics for the filter rules, computed on demand and cached."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import filterfalse
from typing import TypeVar

from bmforge.data.clean.cached_value import cached_property
from bmforge.data.clean.characters import HAN_RUN, SENTENCE_ENDS, SYMBOL_CHARACTERS
from bmforge.data.clean.ngrams import RepeatedNgrams, TopNgrams
from bmforge.data.clean.string_cache import StringCache
from bmforge.data.clean.words import (
    WordSplitter,
    count_sentences,
    count_sentences_in,
    has_word_spaces,
    split_words,
    words_of,
)

__all__ = ["TextStatistics", "find_repeated"]

Value = TypeVar("Value")

_PARAGRAPH_BREAK = re.compile("\n{2,}")
_LINE_BREAK = re.compile("\n+")
_SENTENCE_ENDS = frozenset(SENTENCE_ENDS)
_IS_SYMBOL = StringCache(lambda word: not word.strip(SYMBOL_CHARACTERS))
_HAS_LETTER = StringCache(lambda word: any(map(str.isalpha, word)))


def find_repeated(parts: Sequence[str]) -> tuple[int, int]:
    """Return the number of strings that repeat an earlier one, and their number of characters."""
    if len(distinct := set(parts)) == len(parts):
        return 0, 0
    return len(parts) - len(distinct), sum(map(len, parts)) - sum(map(len, distinct))


class TextStatistics:
    """Statistics of one text, computed on first use and cached.

    Args:
        text: text to analyze.
        split: function that splits the text, or a line, into words (default: the splitter for the
            text's script).
        count: function that counts the sentences of a line (default: counts them in the words that
            `split` returns).
    """

    def __init__(
        self,
        text: str,
        split: WordSplitter = words_of,
        count: Callable[[str], int] | None = None,
    ) -> None:
        self.text = text
        self.split = split
        by_words = lambda line: count_sentences(split(line))  # noqa: E731
        count = count or (count_sentences_in if split is split_words else by_words)
        self._count_sentences = count
        self._sentences: dict[str, int] = {}
        self._found: dict[object, object] = {}

    def once(self, find: Callable[[TextStatistics], Value]) -> Value:
        """Return ``find(self)``; the result is cached, so that several rules can use it."""
        if find not in self._found:
            self._found[find] = find(self)
        return self._found[find]  # type: ignore[return-value]

    @cached_property
    def words(self) -> list[str]:
        """Words and punctuation marks of the text."""
        return self.split(self.text)

    @cached_property
    def _other_words(self) -> list[str]:
        """Words that do not consist of letters only: marks, numbers, and words like "3rd"."""
        return list(filterfalse(str.isalpha, self.words))

    @cached_property
    def _joined(self) -> str:
        """All words of the text, joined without spaces."""
        return "".join(self.words)

    @cached_property
    def real_words(self) -> tuple[int, int]:
        """Number of words that are not only punctuation, and number of characters in them."""
        symbols = list(filter(_IS_SYMBOL.__getitem__, self._other_words))
        return len(self.words) - len(symbols), len(self._joined) - sum(map(len, symbols))

    @cached_property
    def words_with_letters(self) -> int:
        """Number of words that contain a letter."""
        others = self._other_words
        return len(self.words) - len(others) + sum(map(_HAS_LETTER.__getitem__, others))

    def count_sentences(self, line: str) -> int:
        """Return the number of sentences of a line.

        Cached, as several rule sets count each line.
        """
        if line not in self._sentences:
            self._sentences[line] = self._count_sentences(line)
        return self._sentences[line]

    @cached_property
    def lines(self) -> list[str]:
        """Lines of the text, split at any Unicode line end."""
        return self.text.splitlines()

    @cached_property
    def filled_lines(self) -> list[str]:
        """Nonblank lines of the text, split at newlines only."""
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
        """Fraction of the paragraphs that are repeats, and fraction of the characters in them."""
        if "\n\n" not in self.text:
            return 0.0, 0.0
        parts = _PARAGRAPH_BREAK.split(self.text.strip())
        number, characters = find_repeated(parts)
        return number / len(parts), characters / max(len(self.text), 1)

    @cached_property
    def repeated_lines(self) -> tuple[float, float]:
        """Fraction of the lines that are repeats, and fraction of the characters in them."""
        has_blank_lines = "\n\n" in self.text
        parts = _LINE_BREAK.split(self.text) if has_blank_lines else self.text.split("\n")
        number, characters = find_repeated(parts)
        return number / len(parts), characters / max(len(self.text), 1)

    def top_ngram_share(self, n: int) -> float:
        """Return the fraction of characters in the most frequent word n-gram, including spaces.

        If no n-gram occurs twice, one that occurs once is used, as in datatrove. In scripts without
        spaces between words the result is then 0, because each "word" is a whole clause.
        """
        if len(self.words) < n:
            return 0.0
        top, times = self._top_ngrams.top(n)
        if times == 1 and not self._has_word_spaces:
            return 0.0
        return (sum(map(len, top)) + n - 1) * times / len(self.text)

    def is_top_ngram_within(self, n: int, high: float) -> bool:
        """Return True if a cheap bound proves that ``top_ngram_share(n)`` is at most `high`."""
        # A smaller factor, so that rounding never makes the bound larger than the exact share.
        return self._top_ngrams.is_within(n, high * 0.999999 * len(self.text))

    @cached_property
    def _has_word_spaces(self) -> bool:
        return has_word_spaces(self.text)

    @cached_property
    def _top_ngrams(self) -> TopNgrams:
        return TopNgrams(self.words)

    @cached_property
    def _repeated_ngrams(self) -> RepeatedNgrams:
        return RepeatedNgrams(self.words, self._joined)

    def repeated_ngram_share(self, n: int) -> float:
        """Return the fraction of characters in word n-grams that repeat an earlier one.

        After a repeated n-gram, the search continues at its end, so that n-grams do not overlap.
        """
        if len(self.words) <= n:  # at most one n-gram
            return 0.0
        return self._repeated_ngrams.repeated_characters(n) / len(self.text)

    def ends_sentence_share(self) -> float:
        """Fraction of nonblank lines that end with a sentence-ending mark."""
        lines = self.filled_lines
        return sum(line[-1] in _SENTENCE_ENDS for line in lines) / max(len(lines), 1)

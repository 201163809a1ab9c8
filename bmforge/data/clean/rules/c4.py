"""C4's filter rules, which select the lines of a page and drop whole pages.

Source: Raffel et al. 2020, arXiv:1910.10683, section 2.2; the code of tensorflow-datasets
(c4_utils.py) adds the bound on long words and the policy phrases.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from bmforge.data.clean.characters import SENTENCE_ENDS
from bmforge.data.clean.rule import Bounds, Rule, RuleSet
from bmforge.data.clean.statistics import TextStatistics

__all__ = ["C4", "C4_ANY_END", "KeptLines", "select_lines"]

_PAPER = "Raffel et al. 2020, arXiv:1910.10683"
_CITATION = re.compile(r"\[\d*]|\[edit]|\[citation needed]")
# Sentence ends: the paper's for English, and those of other scripts.
_ENDS = frozenset((*".?!\"'", *(end for end in SENTENCE_ENDS if not end.isascii())))
_POLICIES = (
    "terms of use",
    "privacy policy",
    "cookie policy",
    "uses cookies",
    "use of cookies",
    "use cookies",
)
_PHRASES = ("lorem ipsum", "javascript", "{", *_POLICIES)
_LONGEST_WORD = 1000
_FEWEST_WORDS = 3


@dataclass(frozen=True)
class KeptLines:
    """Result of C4's line filter for one page.

    Attributes:
        lines: lines that are kept.
        sentences: number of sentences in these lines.
        found: name of the rule that drops the page; "" if no rule does.
    """

    lines: tuple[str, ...]
    sentences: int
    found: str = ""


def select_lines(text: TextStatistics, any_end: bool = False) -> KeptLines:
    """Select the lines of a page that look like sentences, by C4's rules.

    A line must have a sentence-ending mark and three words, and not mention policies or JavaScript.

    Args:
        text: statistics of the text.
        any_end: True to also keep lines without a sentence-ending mark, as FineWeb does.
    """
    lines: list[str] = []
    has_phrase = text.once(_has_phrase)
    for line, has_end in text.once(_long_lines):
        if not (any_end or has_end):
            continue
        if has_phrase:
            lower = line.lower()
            if "lorem ipsum" in lower:
                return KeptLines((), 0, "lorem_ipsum")
            if "javascript" in lower:
                continue
            if "{" in line:
                return KeptLines((), 0, "curly_bracket")
            if any(phrase in lower for phrase in _POLICIES):
                continue
        lines.append(line)
    return KeptLines(tuple(lines), sum(map(text.count_sentences, lines)))


def _has_phrase(text: TextStatistics) -> bool:
    """Return True if a line may have a phrase for which C4 drops the line or the page."""
    lower = _CITATION.sub("", text.text).lower()
    return any(phrase in lower for phrase in _PHRASES)


def _long_lines(text: TextStatistics) -> list[tuple[str, bool]]:
    """Return the lines of at least three words, and whether each has a sentence-ending mark.

    Citations are removed after words are counted. Lines with an overlong word are omitted.
    """
    lines = []
    for raw in text.lines:
        line = raw.strip()
        if len(line) > _LONGEST_WORD and max(map(len, line.split())) > _LONGEST_WORD:
            continue
        if len(line.split(None, _FEWEST_WORDS - 1)) < _FEWEST_WORDS:
            continue
        if "[" in line:
            line = _CITATION.sub("", line)
        lines.append((line, line[-1:] in _ENDS and not line.endswith("...")))
    return lines


def _any_end(text: TextStatistics) -> KeptLines:
    return select_lines(text, any_end=True)


def _make_set(name: str, select: Callable[[TextStatistics], KeptLines]) -> RuleSet:
    def filler(text: TextStatistics) -> float:
        return text.once(select).found == "lorem_ipsum"

    def brackets(text: TextStatistics) -> float:
        return text.once(select).found == "curly_bracket"

    def sentences(text: TextStatistics) -> float:
        return text.once(select).sentences

    def rewrite(text: TextStatistics) -> str:
        return "\n".join(text.once(select).lines).strip()

    rules = (
        Rule(
            "lorem_ipsum",
            filler,
            Bounds(None, 0),
            "1 if the text contains filler text",
            _PAPER,
            "Lorem ipsum dolor sit amet.",
        ),
        Rule(
            "curly_bracket",
            brackets,
            Bounds(None, 0),
            "1 if the text contains a curly bracket",
            _PAPER,
            "if (x) { return y; }",
        ),
        Rule(
            "too_few_sentences",
            sentences,
            Bounds(5),
            "sentences in the kept lines",
            _PAPER,
            "Page not found. Go back.",
        ),
    )
    return RuleSet(name, 1, rules, _PAPER, rewrite=rewrite)


C4 = _make_set("c4", select_lines)
C4_ANY_END = _make_set("c4_any_end", _any_end)

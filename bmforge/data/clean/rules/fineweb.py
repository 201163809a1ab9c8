"""FineWeb's line rules, which are applied after those of Gopher and C4."""

from __future__ import annotations

from bmforge.data.clean.rule import Bounds, Rule, RuleSet
from bmforge.data.clean.statistics import TextStatistics, find_repeated

__all__ = ["FINEWEB", "line_rules"]

_PAPER = "Penedo et al. 2024, arXiv:2406.17557, section 3.6"
_SHORT_LINE = 30


def _filled_lines(text: TextStatistics) -> float:
    return len(text.filled_lines)


def _short_lines(text: TextStatistics) -> float:
    lines = text.filled_lines
    return sum(len(line) <= _SHORT_LINE for line in lines) / max(len(lines), 1)


def _repeated_characters(text: TextStatistics) -> float:
    total = len(text.text) - text.text.count("\n")
    return find_repeated(text.filled_lines)[1] / max(total, 1)


def _newlines(text: TextStatistics) -> float:
    number = text.text.count("\n")
    return number / max(len(text.words), 1) if number else 0.0


def line_rules(
    ends: float, short: float | None, repeated: float, newlines: float, source: str = _PAPER
) -> tuple[Rule, ...]:
    """Return FineWeb's rules on the lines of a text, with the given bounds.

    Args:
        ends: smallest fraction of lines that end with a sentence-ending mark.
        short: largest fraction of short lines; None to omit the rule.
        repeated: largest fraction of characters in repeated lines.
        newlines: largest number of newlines per word.
        source: publication from which the bounds are taken.
    """
    menu = "Home\nShop\nContact us\nSign in"
    rules = [
        Rule(
            "empty",
            _filled_lines,
            Bounds(1),
            "lines that are not blank",
            source,
            "\n \n",
        ),
        Rule(
            "line_punct_ratio",
            TextStatistics.ends_sentence_share,
            Bounds(ends),
            "fraction of lines that end with sentence punctuation",
            source,
            menu,
        ),
    ]
    if short is not None:
        rules.append(
            Rule(
                "short_line_ratio",
                _short_lines,
                Bounds(None, short),
                f"fraction of lines of at most {_SHORT_LINE} characters",
                source,
                menu,
            )
        )
    rules += [
        Rule(
            "char_dup_ratio",
            _repeated_characters,
            Bounds(None, repeated),
            "fraction of characters in lines that occurred before",
            source,
            "Read more\nRead more",
        ),
        Rule(
            "list_ratio",
            _newlines,
            Bounds(None, newlines),
            "newlines per word",
            source,
            "red\ngreen\nblue",
        ),
    ]
    return tuple(rules)


FINEWEB = RuleSet("fineweb", 1, line_rules(0.12, 0.67, 0.01, 0.3), _PAPER)

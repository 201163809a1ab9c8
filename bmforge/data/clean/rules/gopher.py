"""Gopher's filter rules on the quality of words and lines, and on repetition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from operator import methodcaller

from bmforge.data.clean.rule import Bounds, Rule, RuleSet
from bmforge.data.clean.statistics import TextStatistics

__all__ = [
    "GOPHER_QUALITY",
    "GOPHER_REPETITION",
    "count_stop_words",
    "quality_rules",
    "repetition_rules",
]

_PAPER = "Rae et al. 2021, arXiv:2112.11446"
_QUALITY = f"{_PAPER}, A1.1"
_TABLE = f"{_PAPER}, table A1"
_STOP_WORDS = frozenset(["the", "be", "to", "of", "and", "that", "have", "with"])
_TOP = ((2, 0.20), (3, 0.18), (4, 0.16))
_REPEATED = ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10))


def _count_words(text: TextStatistics) -> float:
    return text.real_words[0]


def _mean_length(text: TextStatistics) -> float:
    number, characters = text.real_words
    return characters / max(number, 1)


def _hashes(text: TextStatistics) -> float:
    return text.text.count("#") / max(len(text.words), 1)


def _ellipses(text: TextStatistics) -> float:
    return (text.text.count("...") + text.text.count("…")) / max(len(text.words), 1)


def _bullets(text: TextStatistics) -> float:
    if "-" not in text.text and "•" not in text.text:
        return 0.0
    return sum(line.lstrip().startswith(("•", "-")) for line in text.lines) / max(
        len(text.lines), 1
    )


def _cut_lines(text: TextStatistics) -> float:
    if "..." not in text.text and "…" not in text.text:
        return 0.0
    num_cut = sum(line.rstrip().endswith(("...", "…")) for line in text.lines)
    return num_cut / max(len(text.lines), 1)


def _letters(text: TextStatistics) -> float:
    return text.words_with_letters / max(len(text.words), 1)


def count_stop_words(text: TextStatistics, stop_words: frozenset[str] = _STOP_WORDS) -> float:
    """Return the number of distinct stop words in a text."""
    return len(stop_words.intersection(text.words))


_REAL_WORDS = "words that are not only punctuation"
_WORD_LENGTH = "mean word length in characters"
# Name, measure, meaning, and a text that violates the rule; the bounds are in `quality_rules`.
_QUALITY_RULES = (
    ("short_doc", _count_words, _REAL_WORDS, "Subscribe to our newsletter."),
    ("long_doc", _count_words, _REAL_WORDS, "a dump of a whole forum"),
    ("below_avg_threshold", _mean_length, _WORD_LENGTH, "a b c 1 2 3 x y z"),
    ("above_avg_threshold", _mean_length, _WORD_LENGTH, "aHR0cHM6Ly9leGFtcGxlLm9yZw"),
    ("too_many_hashes", _hashes, "number signs per word", "#sale #new"),
    ("too_many_ellipsis", _ellipses, "ellipses per word", "Wait... no..."),
    (
        "too_many_bullets",
        _bullets,
        "fraction of lines that begin with a bullet or a hyphen",
        "- Home\n- Shop\n- Contact",
    ),
    (
        "too_many_end_ellipsis",
        _cut_lines,
        "fraction of lines that end in an ellipsis",
        "Shares fall as ...\nMinister says ...",
    ),
    (
        "below_alpha_threshold",
        _letters,
        "fraction of words with a letter",
        "12 : 30 | 14 : 45 | 17 : 00",
    ),
)


def quality_rules(
    word_length: tuple[float, float],
    letters: float,
    stop_words: frozenset[str],
    words: tuple[float, float] = (50, 100_000),
    source: str = _QUALITY,
) -> tuple[Rule, ...]:
    """Return Gopher's rules on words and lines, with the given bounds.

    Args:
        word_length: smallest and largest mean word length, in characters.
        letters: smallest fraction of words with a letter.
        stop_words: stop words, two of which must occur.
        words: smallest and largest number of words.
        source: publication from which these bounds are taken; the bounds on symbols and bullets
            are always those of the Gopher paper.
    """
    few, many = words
    short, long = word_length
    bounds = {
        "short_doc": Bounds(few),
        "long_doc": Bounds(None, many),
        "below_avg_threshold": Bounds(short),
        "above_avg_threshold": Bounds(None, long),
        "too_many_hashes": Bounds(None, 0.1),
        "too_many_ellipsis": Bounds(None, 0.1),
        "too_many_bullets": Bounds(None, 0.9),
        "too_many_end_ellipsis": Bounds(None, 0.3),
        "below_alpha_threshold": Bounds(letters),
    }
    rules = [
        Rule(name, measure, bounds[name], meaning, source, example)
        for name, measure, meaning, example in _QUALITY_RULES
    ]
    needed = partial(count_stop_words, stop_words=stop_words)
    meaning = f"distinct words from this list: {' '.join(sorted(stop_words))}"
    example = "Black leather sofa, new, three seats"
    return (*rules, Rule("enough_stop_words", needed, Bounds(2), meaning, source, example))


GOPHER_QUALITY = RuleSet("gopher_quality", 1, quality_rules((3, 10), 0.8, _STOP_WORDS), _PAPER)


def _repeated_paragraphs(text: TextStatistics) -> float:
    return text.repeated_paragraphs[0]


def _repeated_paragraph_characters(text: TextStatistics) -> float:
    return text.repeated_paragraphs[1]


def _repeated_lines(text: TextStatistics) -> float:
    return text.repeated_lines[0]


def _repeated_line_characters(text: TextStatistics) -> float:
    return text.repeated_lines[1]


def _is_top_within(n: int, text: TextStatistics, high: float) -> bool:
    return text.is_top_ngram_within(n, high)


_LINE_RULES = {
    "dup_para_frac": (_repeated_paragraphs, "fraction of paragraphs that occurred before"),
    "dup_para_char_frac": (
        _repeated_paragraph_characters,
        "fraction of the text's characters in paragraphs that occurred before",
    ),
    "dup_line_frac": (_repeated_lines, "fraction of lines that occurred before"),
    "dup_line_char_frac": (
        _repeated_line_characters,
        "fraction of the text's characters in lines that occurred before",
    ),
}


def repetition_rules(
    lines: Mapping[str, float],
    top: Sequence[tuple[int, float]],
    repeated: Sequence[tuple[int, float]],
    source: str = _TABLE,
) -> tuple[Rule, ...]:
    """Return Gopher's rules on repetition, with the given bounds.

    Args:
        lines: dict from the name of a rule on paragraphs or lines to its upper bound.
        top: pairs of an n-gram size and the largest fraction of characters in the most frequent
            n-gram.
        repeated: pairs of an n-gram size and the largest fraction of characters in repeated
            n-grams.
        source: publication from which the bounds are taken.
    """
    rules = []
    for name, high in lines.items():
        measure, meaning = _LINE_RULES[name]
        rules.append(
            Rule(name, measure, Bounds(None, high), meaning, source, "Home\nShop\nHome\nShop")
        )
    for n, high in top:
        meaning = f"fraction of the text's characters in its most frequent word {n}-gram"
        example = " ".join(["buy now"] * 2 * n)
        rules.append(
            Rule(
                f"top_{n}_gram",
                methodcaller("top_ngram_share", n),
                Bounds(None, high),
                meaning,
                source,
                example,
                is_within=partial(_is_top_within, n),
            )
        )
    for n, high in repeated:
        name = f"duplicated_{n}_n_grams"
        meaning = f"fraction of the text's characters in word {n}-grams that occurred before"
        example = "a paragraph that was pasted twice"
        rules.append(
            Rule(
                name,
                methodcaller("repeated_ngram_share", n),
                Bounds(None, high),
                meaning,
                source,
                example,
            )
        )
    return tuple(rules)


GOPHER_REPETITION = RuleSet(
    "gopher_repetition",
    2,
    repetition_rules(
        {
            "dup_para_frac": 0.3,
            "dup_para_char_frac": 0.2,
            "dup_line_frac": 0.3,
            "dup_line_char_frac": 0.2,
        },
        _TOP,
        _REPEATED,
    ),
    _PAPER,
)

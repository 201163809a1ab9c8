"""Text statistics: equal to plain loops on generated texts, for each rule set."""

from __future__ import annotations

import re
import string
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmforge.data.clean.characters import SENTENCE_ENDS, SYMBOL_CHARACTERS
from bmforge.data.clean.ngrams import _with_shared_prefix, _with_shared_prefix_array
from bmforge.data.clean.rules import RULE_SETS
from bmforge.data.clean.rules.c4 import KeptLines, select_lines
from bmforge.data.clean.statistics import TextStatistics
from bmforge.data.clean.string_cache import StringCache
from bmforge.data.clean.words import (
    _split_by_rules,
    _split_run,
    count_sentences,
    count_sentences_in,
    split_words,
)

# Few distinct words, some of which are other words put together: n-grams repeat, and different
# words give equal strings.
NGRAM_WORDS = st.sampled_from(["a", "b", "ab", "abc", "c", ".", "been", "was"])
PIECES = [
    *["the", "and", "U.S.", "3.5", "3", "don't", "cannot", "Mr.", "end.", "end!", '"said', "?"],
    *["...", "wait…", "(in", "brackets)", ".", '."', "- item", "• item", "a.b", "x,y", "one/two"],
    *["是的。", "好", "नमस्ते।", "café", "é́", "#tag", "[1]", "[edit]", "javascript", "{", "cookies"],
    *["lorem [2]ipsum", "use cookies", "Lorem ipsum", "privacy policy", "x" * 1001, "¿qué?"],
    *["www.example.org/a.", "a@b.org,", "10km", "x.y.", ":)", "A.", "\u2028", "\x1c"],
]
TEXTS = st.lists(st.tuples(st.sampled_from(PIECES), st.sampled_from([" ", " ", "\n", "\n\n"])))
RUNS = st.text(st.sampled_from(string.ascii_letters + string.digits + ".,:;!?()'\"-/@%$’"))


def plain_top_share(words, text, n):
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    if not grams:
        return 0.0
    times = [grams.count(gram) for gram in grams]
    top = grams[times.index(max(times))]
    return len(" ".join(top)) * max(times) / len(text)


def plain_repeated_share(words, text, n):
    seen, total, at = [], 0, 0
    while at + n <= len(words):
        gram = "".join(words[at : at + n])
        if gram in seen:
            total, at = total + len(gram), at + n
        else:
            seen.append(gram)
            at += 1
    return total / len(text)


def plain_lines(text, any_end):
    """C4's rules, line by line as the paper states them."""
    kept = []
    ends = {".", "?", "!", '"', "'", *(end for end in SENTENCE_ENDS if ord(end) > 127)}
    for raw in text.splitlines():
        words = raw.split()
        line = re.sub(r"\[\d*]|\[edit]|\[citation needed]", "", raw.strip())
        if max(map(len, words), default=0) > 1000 or len(words) < 3:
            continue
        if not any_end and (not line or line[-1] not in ends or line.endswith("...")):
            continue
        lower = line.lower()
        if "lorem ipsum" in lower:
            return KeptLines((), 0, "lorem_ipsum")
        if "javascript" in lower:
            continue
        if "{" in line:
            return KeptLines((), 0, "curly_bracket")
        policies = "terms of use|privacy policy|cookie policy|uses cookies|use of cookies"
        if not re.search(f"{policies}|use cookies", lower):
            kept.append(line)
    return KeptLines(tuple(kept), sum(count_sentences(split_words(line)) for line in kept))


def check_ngrams(words):
    text = " ".join(words) or " "
    figures = TextStatistics(text, str.split)
    for n in (2, 3, 4, 5, 6, 10, 7, 2):
        assert figures.top_ngram_share(n) == plain_top_share(words, text, n)
        assert figures.repeated_ngram_share(n) == plain_repeated_share(words, text, n)


@given(st.lists(NGRAM_WORDS))
@settings(max_examples=100, deadline=None)
def test_shares_of_ngrams_equal_a_plain_count(words):
    check_ngrams(words)


@pytest.mark.long
@given(st.lists(NGRAM_WORDS, min_size=40, max_size=400))
@settings(max_examples=500, deadline=None)
def test_shares_of_ngrams_of_longer_texts_equal_a_plain_count(words):
    check_ngrams(words)


@given(TEXTS)
@settings(max_examples=150, deadline=None)
def test_lines_and_words_equal_plain_loops(pieces):
    text = "".join(piece + space for piece, space in pieces)
    figures = TextStatistics(text, split_words)
    for any_end in (False, True):
        assert select_lines(figures, any_end) == plain_lines(text, any_end)
    words = split_words(text)
    real = [word for word in words if word.strip(SYMBOL_CHARACTERS)]
    assert figures.real_words == (len(real), sum(map(len, real)))
    letters = sum(any(character.isalpha() for character in word) for word in words)
    assert figures.words_with_letters == letters
    lines = [line for line in text.split("\n") if line.strip()]
    ends = sum(line.endswith(SENTENCE_ENDS) for line in lines) / max(len(lines), 1)
    assert figures.ends_sentence_share() == ends
    for split, (number, _) in (
        ("\n{2,}", figures.repeated_paragraphs),
        ("\n+", figures.repeated_lines),
    ):
        parts = re.split(split, text.strip() if split == "\n{2,}" else text)
        assert number == (len(parts) - len(set(parts))) / len(parts)


@given(TEXTS)
@settings(max_examples=150, deadline=None)
def test_sentences_of_a_text_are_those_of_its_words(pieces):
    text = "".join(piece + space for piece, space in pieces)
    assert count_sentences_in(text) == count_sentences(split_words(text))


@given(RUNS.filter(bool))
@settings(max_examples=300, deadline=None)
def test_strings_of_letters_and_a_mark_are_split_as_by_the_rules(run):
    assert _split_run(run) == _split_by_rules(run)


@pytest.mark.parametrize("mark", ["", *",;:!?)\".'"])
def test_words_that_the_rules_divide_are_divided_before_a_mark(mark):
    for word in (
        "cannot",
        "Cannot",
        "dont",
        "DIDNT",
        "im",
        "Id",
        "ID",
        "US",
        "vs",
        "etc",
        "x",
        "D",
    ):
        assert _split_run(word + mark) == _split_by_rules(word + mark)


def test_no_letter_is_a_symbol():
    """`real_words` and `words_with_letters` look only at words that are not all letters."""
    assert not any(map(str.isalpha, SYMBOL_CHARACTERS))
    assert not any(map(str.isalpha, SENTENCE_ENDS))
    assert all(len(end) == 1 for end in SENTENCE_ENDS)


def test_a_cache_computes_frequent_strings_once():
    calls = []
    cache = StringCache(lambda key: calls.append(key) or len(key), max_entries=2)
    assert [cache[key] for key in ("a", "bb", "a", "ccc", "a", "bb")] == [1, 2, 1, 3, 1, 2]
    assert calls == ["a", "bb", "ccc"]
    assert len(cache) <= 2
    assert cache["x" * 65] == 65
    assert "x" * 65 not in cache


def test_each_rule_set_judges_an_empty_text():
    for rules in RULE_SETS.values():
        for rule in rules.rules:
            assert rule.measure(TextStatistics("", split_words)) >= 0


@given(st.lists(NGRAM_WORDS, min_size=1), st.integers(2, 6), st.floats(0, 1))
@settings(max_examples=300, deadline=None)
def test_a_bound_on_the_top_ngram_never_hides_a_larger_share(words, n, high):
    """The bound may be unknown (False), but True is never wrong; it is True for a bound of 100."""
    figures = TextStatistics(" ".join(words), str.split)
    if figures.is_top_ngram_within(n, high):
        assert figures.top_ngram_share(n) <= high
    assert figures.is_top_ngram_within(n, 100.0 * len(words))


@given(st.lists(NGRAM_WORDS | st.sampled_from(["中", "\ud800", "longer"])), st.integers(1, 6))
@settings(max_examples=200, deadline=None)
def test_arrays_find_the_same_positions_as_strings(words, n):
    starts = list(accumulate(map(len, words), initial=0))
    if len(words) >= n:
        expected = _with_shared_prefix("".join(words), starts, n)
        assert _with_shared_prefix_array("".join(words), starts, n) == expected

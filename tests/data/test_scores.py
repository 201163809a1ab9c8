"""Scores against closed forms and held-out texts; lists of words and hosts."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from bmforge.data.clean.drop import Drop
from bmforge.data.clean.lists import HostBlocklist, WordBlocklist
from bmforge.data.clean.scores import (
    LinearScorer,
    ScoreText,
    bucket_of,
    find_buckets,
    train_linear,
    train_perplexity,
)
from bmforge.data.sources.document import Document
from bmforge.errors import ConfigError, DataError


def texts_of(words, seed, count=40):
    draw = random.Random(seed)
    return [" ".join(draw.choice(words) for _ in range(30)) for _ in range(count)]


SHARED = [f"s{i}" for i in range(20)]
GOOD = [f"g{i}" for i in range(20)] + SHARED
BAD = [f"b{i}" for i in range(20)] + SHARED


def test_a_classifier_tells_held_out_texts_and_survives_a_file(tmp_path):
    scorer = train_linear(texts_of(GOOD, 0), texts_of(BAD, 1), size=1 << 12)
    good, bad = scorer(texts_of(GOOD, 2)), scorer(texts_of(BAD, 3))
    assert min(good) > 0.5 > max(bad)
    scorer.save(tmp_path / "scorer.npz")
    again = LinearScorer.load(tmp_path / "scorer.npz")
    assert again(texts_of(GOOD, 2)) == good
    same = train_linear(texts_of(GOOD, 0), texts_of(BAD, 1), size=1 << 12)
    assert np.array_equal(same.weights, scorer.weights)
    (tmp_path / "scorer.npz").write_bytes(b"no")
    with pytest.raises(DataError, match="not a classifier"):
        LinearScorer.load(tmp_path / "scorer.npz")
    with pytest.raises(ConfigError, match="good and one bad"):
        train_linear([], ["a"])


def test_perplexity_is_that_of_the_interpolated_counts():
    model = train_perplexity(["a b a b c"])
    # Probabilities of "a b c" by hand: counts a 2, b 2, c 1, ab 2, bc 1, abc 1; 3 words, 5 in all.
    chances = [
        0.1 * 3 / 8,
        0.1 * 3 / 8 + 0.3 * 2 / 2,
        0.1 * 2 / 8 + 0.3 * 1 / 2 + 0.6 * 1 / 2,
    ]
    expected = math.prod(chances) ** (-1 / 3)
    assert model(["a b c", ""]) == [pytest.approx(expected, rel=1e-6), math.inf]


def test_buckets_are_thirds():
    values = [float(n) for n in random.Random(0).sample(range(300), 300)]
    bounds = find_buckets([*values, math.inf])
    counts = [
        sum(bucket_of(value, bounds) == name for value in values)
        for name in ("head", "middle", "tail")
    ]
    assert counts == [100, 100, 100]
    assert bucket_of(math.inf, bounds) == "tail"
    with pytest.raises(ConfigError, match="three buckets"):
        find_buckets([1.0, math.inf])


def test_any_score_is_noted_and_bounded():
    step = ScoreText("length", lambda texts: [float(len(text)) for text in texts], low=2, high=4)
    assert step(Document("abc", "f")).scores == {"length": 3.0}
    assert step(Document("a", "f")) == Drop("score.length", 1.0, 2, "a")
    assert step(Document("abcde", "f")).bound == 4
    broken = ScoreText("none", lambda texts: [math.nan] * len(texts), low=0)
    assert isinstance(broken(Document("a", "f")), Drop)


def test_listed_words_are_whole_words_or_chinese():
    pytest.importorskip("ahocorasick_rs")
    step = WordBlocklist(("Ass", "赌场"), most_per_line=0)
    for text in ("a classic assessment", "下赌注的场所"):
        assert isinstance(step(Document(text, "f")), Document)
    assert step(Document("An ASS, they said", "f")) == Drop("listed_words", 1, 0, "ass, they said")
    assert step(Document("线上赌场网", "f")).excerpt == "赌场网"
    half = WordBlocklist(("bad",))
    assert isinstance(half(Document("bad\ngood", "f")), Document)
    assert half(Document("bad bad\ngood", "f")).value == 1.0
    with pytest.raises(ConfigError, match="empty"):
        WordBlocklist(("",))


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("https://bad.org/a", False),
        ("http://www.BAD.org:80/a", False),
        ("https://notbad.org", True),
        ("https://bad.org.example.com", True),
        ("", True),
        ("http://[broken", True),
    ],
)
def test_hosts_and_those_below_them(url, kept):
    result = HostBlocklist(("Bad.org",))(Document("text", "f", url=url))
    assert isinstance(result, Document) == kept

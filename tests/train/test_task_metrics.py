"""The figures of tasks, against the benchmarks' own definitions written out."""

from __future__ import annotations

import random
import re
import string
from collections import Counter

import pytest

from bmforge.data.tasks import TaskExample
from bmforge.data.tasks.metrics import (
    accuracy,
    answer_scores,
    class_f1,
    multirc_scores,
    normalize_answer,
    score_task,
    token_f1,
)
from bmforge.errors import ConfigError, ShapeError


def official_normalize(text: str) -> str:
    """SQuAD 1.1's script, step by step."""
    text = "".join(letter for letter in text.lower() if letter not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def official_f1(prediction: str, truth: str) -> float:
    """SQuAD 1.1's script: precision and recall of words."""
    mine, right = official_normalize(prediction).split(), official_normalize(truth).split()
    same = sum((Counter(mine) & Counter(right)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(mine), same / len(right)
    return 2 * precision * recall / (precision + recall)


def random_text(generator: random.Random) -> str:
    words = ["The", "a", "Cat", "cat.", "an", "dog's", "(sat)", "theme", "on--the", "U.S.", " "]
    return " ".join(generator.choices(words, k=generator.randrange(0, 6)))


def test_answers_are_scored_as_by_squads_script() -> None:
    generator = random.Random(0)
    texts = [random_text(generator) for _ in range(300)]
    accepted = [[random_text(generator) for _ in range(generator.randrange(1, 4))] for _ in texts]
    for text, answers in zip(texts, accepted, strict=True):
        assert normalize_answer(text) == official_normalize(text)
        assert token_f1(text, answers[0]) == pytest.approx(official_f1(text, answers[0]), abs=1e-12)
    scores = answer_scores(texts, accepted)
    pairs = list(zip(texts, accepted, strict=True))
    f1 = sum(max(official_f1(t, a) for a in some) for t, some in pairs) / len(pairs)
    em = sum(
        any(official_normalize(t) == official_normalize(a) for a in some) for t, some in pairs
    ) / len(pairs)
    assert scores == pytest.approx({"f1": f1, "em": em}, abs=1e-12)
    assert 0 < scores["em"] < scores["f1"] < 1


def test_known_answers() -> None:
    assert normalize_answer("The  Cat, sat on a mat!") == "cat sat on mat"
    assert token_f1("the cat sat", "a cat") == pytest.approx(2 / 3)
    assert answer_scores(["An apple."], [["pear", "apple"]]) == {"f1": 1.0, "em": 1.0}


def test_f1_of_classes_by_hand() -> None:
    """Class 0: 1 hit, 1 false, 1 missed; class 1: 1, 1, 1; class 2: 1, 0, 0."""
    predicted, wanted = [0, 0, 1, 1, 2], [0, 1, 1, 0, 2]
    assert class_f1(predicted, wanted) == pytest.approx((0.5 + 0.5 + 1) / 3)
    assert class_f1(predicted, wanted, "micro") == pytest.approx(accuracy(predicted, wanted))
    assert class_f1([0, 0], [1, 0], "binary") == 0.0


def test_multirc_counts_answers_and_whole_questions() -> None:
    """3 questions, one with every answer right; 2 true positives, 1 false, 1 missed."""
    scores = multirc_scores([1, 0, 1, 1, 0], [1, 0, 1, 0, 1], ["a", "a", "b", "b", "c"])
    assert scores == pytest.approx({"f1a": 2 * 2 / (2 * 2 + 1 + 1), "em": 1 / 3})


def test_every_task_has_its_own_figures() -> None:
    def example(label: int | str, idx: tuple[int, ...] = (0,), **more: tuple[str, ...]):
        return TaskExample({}, label, idx, **more)

    answers = [example(1, (0, 0, 0)), example(0, (0, 0, 1)), example(1, (0, 1, 0))]
    assert score_task("MultiRC", [1, 0, 0], answers) == pytest.approx({"f1a": 2 / 3, "em": 0.5})
    assert score_task("CB", [0, 2], [example(0), example(1)])["f1"] == pytest.approx(1 / 3)
    assert score_task("BoolQ", [0, 1], [example(0), example(0)]) == {"accuracy": 0.5}
    said = example("Rome", answers=("Rome", "the City"))
    assert score_task("ReCoRD", ["city"], [said]) == {"f1": 1.0, "em": 1.0}


def test_what_cannot_be_scored() -> None:
    with pytest.raises(ShapeError, match="2 predictions for 1"):
        accuracy([1, 2], [1])
    with pytest.raises(ShapeError, match="at least one"):
        accuracy([], [])
    with pytest.raises(ShapeError, match="accepted"):
        answer_scores(["x"], [[]])
    with pytest.raises(ConfigError, match="without labels"):
        score_task("BoolQ", [0], [TaskExample({}, None, 0)])

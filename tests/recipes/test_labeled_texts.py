"""The quality classifier on labels of one's own: reading, holding out, and the measured figures."""

from __future__ import annotations

import json
import logging
import random
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import precision_score, recall_score, roc_auc_score

from bmforge.cli import main
from bmforge.data.clean.score_files import load_scorer
from bmforge.errors import ConfigError, DataError
from bmforge.logging import get_logger
from bmforge.recipes.corpus_quality import train_quality
from bmforge.recipes.labeled_texts import hold_out, measure_scores, read_labeled
from bmforge.settings import QualityConfig

GOOD = ["river", "stone", "winter", "garden", "window", "music", "letter", "bridge"]
OTHER = ["click", "cheap", "casino", "prize", "viagra", "winner", "bonus", "offer"]


def write_labels(path: Path, good: object, other: object, count: int = 150, mix: int = 2) -> Path:
    """Write texts whose class is that of most of their words."""
    draw, lines = random.Random(0), []
    for number in range(count):
        own, rest, label = (GOOD, OTHER, good) if number % 2 else (OTHER, GOOD, other)
        words = draw.choices(own, k=10) + draw.choices(rest, k=mix)
        draw.shuffle(words)
        lines.append(json.dumps({"text": " ".join(words), "label": label, "n": number}))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def log() -> Iterator[list[str]]:
    """Messages of bmforge's logger."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    get_logger().addHandler(handler)
    yield messages
    get_logger().removeHandler(handler)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 8).map(lambda n: n / 8), min_size=1, max_size=12),
    st.lists(st.integers(0, 8).map(lambda n: n / 8), min_size=1, max_size=12),
)
def test_figures_are_those_of_scikit_learn(good: list[float], bad: list[float]) -> None:
    score = measure_scores(good, bad)
    truth, scores = [1] * len(good) + [0] * len(bad), [*good, *bad]
    said = np.array(scores) >= 0.5
    assert score.auc == pytest.approx(roc_auc_score(truth, scores))
    assert score.precision == pytest.approx(precision_score(truth, said, zero_division=0))
    assert score.recall == pytest.approx(recall_score(truth, said))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(max_size=5), max_size=30), st.integers(0, 3))
def test_held_out_texts_stay_held_out(texts: list[str], seed: int) -> None:
    learned, kept = hold_out(texts, 0.3, seed)
    assert sorted(learned + kept) == sorted(texts)
    assert not set(learned) & set(kept)
    assert hold_out([*texts, "one more"], 0.3, seed)[1][: len(kept)] == kept


@pytest.mark.parametrize(
    ("good", "other", "options"),
    [
        ("good", "spam", []),
        (1, 0, []),
        ("fine", "bad", ["--good-labels", "fine"]),
        (4, 1.5, ["--good-from", "3"]),
        ("3", "2", ["--good-from", "3"]),
    ],
)
def test_a_classifier_of_own_labels(
    good: object,
    other: object,
    options: list[str],
    tmp_path: Path,
    log: list[str],
) -> None:
    """It ranks new texts of the two kinds, and its log states figures of held-out texts."""
    file = write_labels(tmp_path / "labels.jsonl", good, other)
    words = ["data", "quality", "--labeled", str(file), "--out", str(tmp_path / "out"), *options]
    assert main(words) == 0
    found = re.search(r"on (\d+) good and (\d+) other held-out texts: AUC ([\d.]+)", "".join(log))
    assert found is not None
    assert 5 <= int(found[1]) + int(found[2]) <= 30
    assert float(found[3]) >= 0.95
    scorer, _ = load_scorer(tmp_path / "out" / "quality.npz")
    draw = random.Random(1)
    scores = [scorer([" ".join(draw.choices(own, k=12))])[0] for own in (GOOD, OTHER) * 10]
    assert min(scores[::2]) > 0.5 > max(scores[1::2])


def test_the_figure_is_not_that_of_learned_texts(tmp_path: Path, log: list[str]) -> None:
    """Labels that say nothing of the text are learned by heart, and the AUC is near a half."""
    draw, lines = random.Random(3), []
    for number in range(400):
        text = " ".join(draw.choices(GOOD + OTHER, k=12)) + f" {number}"
        lines.append(json.dumps({"text": text, "label": draw.choice(["good", "bad"])}))
    file = tmp_path / "labels.jsonl"
    file.write_text("\n".join(lines))
    out = tmp_path / "out"
    train_quality(QualityConfig(labeled=(str(file),), out=out, held_out_fraction=0.5))
    found = re.search(r"AUC ([\d.]+)", "".join(log))
    assert found is not None
    assert 0.35 < float(found[1]) < 0.65


@pytest.mark.parametrize(
    ("record", "fields", "message"),
    [
        ({"text": "a", "label": "x"}, {}, "no text counts as good (label=good|1)"),
        ({"text": "a", "label": "good"}, {}, "every text counts as good (label=good|1)"),
        ({"text": "a"}, {}, "has no field 'label' (fields: text)"),
        ({"body": "a", "label": "good"}, {}, "has no field 'text' (fields: body, label)"),
        ({"text": 3, "label": "good"}, {}, "text=3 is not a string"),
        ({"text": "a", "label": "good"}, {"good_from": 2.0}, "label='good' is not a number"),
        (["a"], {}, "has no field 'text' (fields: none)"),
    ],
)
def test_wrong_records_are_refused(
    record: object, fields: dict[str, float], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "labels.jsonl"
    file.write_text(json.dumps(record) + "\n")
    config = QualityConfig(labeled=(str(file),), out=tmp_path / "out", **fields)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=re.escape(message)):
        read_labeled(config)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"labeled": ("a",), "good": ("b",)},
        {"good": ("b",), "good_from": 1.0},
        {"good": ("b",), "held_out_fraction": 1.0},
    ],
)
def test_options_without_effect_are_refused(fields: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        train_quality(QualityConfig(out=tmp_path / "out", **fields))  # type: ignore[arg-type]

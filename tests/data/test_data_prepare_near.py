"""Near duplicates in `prepare`: against plain similarities, on any cut, workers and kills."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prepare_cases import prepare_plainly, written

from bmforge.data import PrepareConfig, prepare, show_preparation
from bmforge.data.dedup.minhash import hash_shingles, jaccard
from bmforge.data.prepare import journal as journal_module
from bmforge.data.prepare.engine import SkippedEntry, StagePart
from bmforge.data.prepare.funnel import Amount
from bmforge.data.prepare.near import SketchTask, dedup_config, sketch_shard
from bmforge.errors import ConfigError

CONFIG = PrepareConfig(
    vocab_size=300, validation_fraction=0.2, shard_bytes=3000, near_duplicates=0.8
)
WORDS = [f"{a}{b}" for a in ("ka", "lo", "mi", "su", "te") for b in ("na", "re", "to", "vi")]
HAN = "天地玄黄宇宙洪荒日月盈昃辰宿列张寒来暑往秋收冬藏闰余成岁律吕调阳云腾致雨露结为霜"


def write_texts() -> list[str]:
    """Eight sets of four texts, of which two nearly repeat the first and one is a copy of it."""
    draw, texts = random.Random(3), []
    for number in range(8):
        chinese = number % 4 == 3
        tokens = draw.choices(HAN if chinese else WORDS, k=120)
        gap = "" if chinese else " "
        first = gap.join(tokens)
        texts += [first, gap.join(tokens[:-4]), gap.join([*tokens, "月" if chinese else "la"])]
        texts.append(first + " \n")
    draw.shuffle(texts)
    return texts


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The texts in two files."""
    folder, texts = tmp_path_factory.mktemp("near"), write_texts()
    for name, part in (("a", texts[:20]), ("b", texts[20:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in part))
    return folder


@pytest.fixture(scope="module")
def plain(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    report, files = prepare_plainly(corpus, tmp_path_factory.mktemp("plain"), CONFIG)
    assert (report.documents, report.duplicates) == (8, 8)
    return files


def test_the_longest_of_each_cluster_is_left(corpus: Path, tmp_path: Path) -> None:
    config = replace(CONFIG, keep_dropped=True, validation_fraction=0.0)
    report = prepare(corpus, tmp_path, config)
    assert report.funnel is not None
    assert report.funnel.missing() == Amount()
    lines = [json.loads(line) for line in (tmp_path / "dropped.jsonl").open()]
    near = [line for line in lines if line["rule"] == "near_duplicate"]
    texts = {text.strip() for text in write_texts()}
    left = texts - {line["text"] for line in near}
    assert len(near) == report.funnel.dropped["near_duplicate"].documents == 16
    for line in near:
        others = texts - {line["text"]}
        alike = {round(similarity(line["text"], one), 4) for one in others} - {0.0}
        assert line["value"] in alike
        assert line["bound"] == 0.8 <= min(alike)
        (better,) = (one for one in left if similarity(one, line["text"]) > 0.8)
        assert len(better) > len(line["text"])
    expected = sum(len(text.encode()) for text in left)
    assert report.train.text_bytes == expected
    assert prepare(corpus, tmp_path, config).reused


def similarity(first: str, second: str) -> float:
    """Return the Jaccard similarity of the sets of 5-grams."""
    return jaccard(hash_shingles(first, 5), hash_shingles(second, 5))


@pytest.mark.parametrize(("shard_bytes", "workers"), [(1, 0), (4000, 2)])
def test_bytes_do_not_depend_on_cut_and_workers(
    corpus: Path, plain: dict[str, bytes], tmp_path: Path, shard_bytes: int, workers: int
) -> None:
    prepare(corpus, tmp_path, replace(CONFIG, shard_bytes=shard_bytes, workers=workers))
    assert written(tmp_path) == plain


class Killed(BaseException):
    """Stands for a kill."""


def test_going_on_after_a_kill_at_every_write(
    corpus: Path, plain: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, left = os.fsync, [0]

    def fragile(descriptor: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Killed
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fragile)
    monkeypatch.setattr(journal_module.fcntl, "flock", lambda *args: None)
    kills = 0
    while True:
        left[0] = 1 + kills % 23
        try:
            prepare(corpus, tmp_path, replace(CONFIG, shard_bytes=8000))
        except Killed:
            kills += 1
        else:
            break
        assert kills < 300
    assert kills > 10
    assert written(tmp_path) == plain


def test_another_threshold_redoes_the_sketches(corpus: Path, tmp_path: Path) -> None:
    config = replace(CONFIG, keep_stages=True)
    prepare(corpus, tmp_path, config)

    def to_do(**changes: Any) -> list[str]:
        states = show_preparation(corpus, tmp_path, replace(config, **changes))
        return [state.stage for state in states if state.done < state.parts]

    behind = ["split", "tokenizer", "encode"]
    assert to_do() == []
    assert to_do(near_duplicates=0.9) == ["sketches", "near_duplicates", *behind]
    assert to_do(near_duplicates=None) == behind


@pytest.mark.parametrize("threshold", [0.1, 1.5, -1.0, float("nan")])
def test_thresholds_out_of_range_are_refused(
    corpus: Path, tmp_path: Path, threshold: float
) -> None:
    with pytest.raises(ConfigError, match=r"near_duplicates=.*must be from 0\.3 to 1"):
        prepare(corpus, tmp_path / "out", replace(CONFIG, near_duplicates=threshold))
    assert not (tmp_path / "out").exists()


def test_a_text_that_a_worker_may_not_touch_stays(corpus: Path, tmp_path: Path) -> None:
    """It gets keys that no other text has."""
    prepare(corpus, tmp_path, replace(CONFIG, keep_stages=True, shard_bytes=1 << 30))
    stages = tmp_path / "preparing.tmp" / "stages"
    config = dedup_config(CONFIG.duplicates)
    assert config is not None
    kept = stages / "duplicates" / "kept"
    task = SketchTask(0, stages / "documents", kept, 0, tmp_path / "again", config)
    entry = kept.read_bytes().index(1)
    touched: list[int] = []
    skips = (SkippedEntry(entry, False, "time", 1.0, 0.5, "x"),)
    sketch_shard(StagePart(0, task, skips), lambda at, reading, name: touched.append(at))
    assert len(touched) == sum(kept.read_bytes()) - 1
    assert entry not in touched
    for name in ("keys", "ids"):
        whole, other = (
            np.load(folder / f"000000.{name}.npy")
            for folder in (stages / "sketches", tmp_path / "again")
        )
        assert whole.shape == other.shape
        same = (whole == other).all(axis=1)
        place = sum(kept.read_bytes()[:entry])
        assert list(np.flatnonzero(~same)) == ([place] if name == "keys" else [])

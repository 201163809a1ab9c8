"""Repeated stretches and texts of earlier corpora in `prepare`, against a plain search."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from prepare_cases import written

from bmforge.data import PrepareConfig, load_tokenizer, open_store, prepare, verify_store
from bmforge.data.prepare.record import PrepareReport, read_record
from bmforge.errors import ConfigError, DataError

CONFIG = PrepareConfig(vocab_size=400, validation_fraction=0.0, shard_bytes=4000, keep_dropped=True)
WORDS = [f"word{n}" for n in range(400)]


def draw_text(seed: int, count: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def texts_of(report: PrepareReport) -> list[str]:
    store, tokenizer = open_store(report.train_prefix), load_tokenizer(report.tokenizer_dir)
    return [tokenizer.decode(store.tokens[a : b - 1].tolist()) for a, b in store.documents()]


def cut_plainly(texts: list[str], least: int) -> list[str]:
    """Cut every run of words that occurred before, by looking at all earlier runs."""
    seen: set[tuple[str, ...]] = set()
    left = []
    for text in texts:
        words = text.split()
        gone = [False] * len(words)
        for start in range(len(words) - least + 1):
            run = tuple(words[start : start + least])
            if run in seen:
                gone[start : start + least] = [True] * least
            seen.add(run)
        left.append(" ".join(word for word, cut in zip(words, gone, strict=True) if not cut))
    return left


@pytest.fixture
def texts() -> list[str]:
    shared, twice = draw_text(0, 90), draw_text(1, 60)
    found = [f"{draw_text(10 + n, 40)} {shared} {draw_text(50 + n, 30)}" for n in range(6)]
    found += [draw_text(90 + n, 80) for n in range(20)]
    found += [f"{twice} and then {twice}", shared, f"{draw_text(0, 49)} short enough"]
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_stretches_that_occur_before_are_cut(
    texts: list[str], tmp_path: Path, workers: int
) -> None:
    path = write(tmp_path / "in.jsonl", texts)
    config = replace(CONFIG, repeated_spans=50, workers=workers)
    report = prepare(path, tmp_path / "out", config)
    expected = cut_plainly(texts, 50)
    assert [" ".join(one.split()) for one in texts_of(report)] == [one for one in expected if one]
    assert report.funnel is not None
    assert report.funnel.dropped["repeated_spans"].documents == expected.count("") == 1
    documents, characters = report.funnel.changed["repeated_spans"]
    changed = [(a, b) for a, b in zip(texts, expected, strict=True) if b and a != b]
    assert documents == len(changed) == 6
    assert abs(characters - sum(len(a) - len(b) for a, b in changed)) <= 2 * documents
    assert verify_store(tmp_path / "out") == []
    assert report.summary is not None
    assert report.summary.languages["unknown"][1] == report.train.text_bytes
    (line,) = (tmp_path / "out" / "dropped.jsonl").read_text("utf-8").splitlines()
    assert json.loads(line)["rule"] == "repeated_spans"


@pytest.mark.parametrize("fraction", [0.05, 0.3])
def test_the_held_out_fraction_is_that_of_the_text_without_stretches(
    tmp_path: Path, fraction: float
) -> None:
    """Three of four documents mostly repeat the first one, so their sizes say nothing."""
    shared = draw_text(0, 3000)
    texts = [f"{shared} {draw_text(10 + n, 100)}" for n in range(4)]
    path = write(tmp_path / "in.jsonl", texts)
    config = replace(CONFIG, repeated_spans=50, validation_fraction=fraction)
    report = prepare(path, tmp_path / "out", config)
    total = sum(len(text.encode()) for text in cut_plainly(texts, 50))
    assert report.train.text_bytes + report.validation.text_bytes == pytest.approx(total, abs=8)
    assert report.validation.text_bytes == pytest.approx(fraction * total, rel=0.1)


def test_near_duplicates_go_first(texts: list[str], tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", [*texts, f"{texts[7]} end"])
    config = replace(CONFIG, repeated_spans=50, near_duplicates=0.8)
    reports = [
        prepare(path, tmp_path / str(size), replace(config, shard_bytes=size))
        for size in (3000, 1 << 20)
    ]
    assert written(reports[0].out_dir) == written(reports[1].out_dir)
    funnel = reports[0].funnel
    assert funnel is not None
    assert funnel.dropped["near_duplicate"].documents == 1
    assert funnel.dropped["repeated_spans"].documents == 1


@pytest.mark.parametrize("near", [None, 0.8])
def test_what_an_earlier_corpus_has_is_left_out(
    texts: list[str], tmp_path: Path, near: float | None
) -> None:
    config = replace(CONFIG, near_duplicates=near)
    first = write(tmp_path / "first.jsonl", texts[6:20])
    prepare(first, tmp_path / "first", replace(config, keep_index=True))
    assert verify_store(tmp_path / "first") == []
    rows = [*texts[10:26], f"{texts[8]} end", f"{texts[9]} end"]
    second = write(tmp_path / "second.jsonl", rows)
    later = replace(config, earlier=(str(tmp_path / "first"),))
    report = prepare(second, tmp_path / "second", later)
    wanted = texts[20:26] + (rows[-2:] if near is None else [])
    assert [" ".join(one.split()) for one in texts_of(report)] == wanted
    assert report.duplicates == 10
    # A third one goes by both.
    prepare(second, tmp_path / "kept", replace(later, keep_index=True))
    both = replace(config, earlier=(str(tmp_path / "first"), str(tmp_path / "kept")))
    third = write(tmp_path / "third.jsonl", [*texts[:26]])
    report = prepare(third, tmp_path / "third", both)
    assert [" ".join(one.split()) for one in texts_of(report)] == texts[:6]


def test_an_index_that_does_not_fit_is_refused(texts: list[str], tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", texts)
    prepare(path, tmp_path / "plain", CONFIG)
    prepare(path, tmp_path / "exact", replace(CONFIG, keep_index=True))

    def ask(corpus: str, near: float | None = None) -> None:
        config = replace(CONFIG, earlier=(str(tmp_path / corpus),), near_duplicates=near)
        prepare(path, tmp_path / "out", config)

    with pytest.raises(ConfigError, match="keep-index"):
        ask("plain")
    with pytest.raises(ConfigError, match=r"near_duplicates=0\.8 differs from the index"):
        ask("exact", 0.8)
    with pytest.raises(DataError, match="no text is left"):
        ask("exact")
    digests = tmp_path / "exact" / "index" / "digests.bin"
    digests.write_bytes(digests.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match="does not match its checksum"):
        ask("exact")
    assert "index/digests.bin" in "\n".join(verify_store(tmp_path / "exact"))
    with pytest.raises(ConfigError, match="50 words or Chinese"):
        prepare(path, tmp_path / "out", replace(CONFIG, repeated_spans=20))


def test_the_next_preparation_takes_the_index_away(texts: list[str], tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", texts)
    prepare(path, tmp_path / "out", replace(CONFIG, keep_index=True, near_duplicates=0.8))
    assert (tmp_path / "out" / "index" / "near" / "index.json").exists()
    prepare(path, tmp_path / "out", CONFIG, overwrite=True)
    assert not list((tmp_path / "out" / "index").rglob("*.*"))
    assert verify_store(tmp_path / "out") == []
    assert read_record(tmp_path / "out")[0].config == CONFIG

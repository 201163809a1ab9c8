from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bmforge.data import (
    PrepareConfig,
    TokenStore,
    load_tokenizer,
    normalize_text,
    prepare,
    python_topics,
    train_bpe,
)
from bmforge.errors import ConfigError, DataError

KINDS = ("bin", "doc", "idx")
SMALL = PrepareConfig(vocab_size=400, validation_fraction=0.2)


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """Ten topics as .jsonl with a copy and an empty text, one more as .txt."""
    texts = [d.text for d in python_topics()][:11]
    folder = tmp_path / "in"
    folder.mkdir()
    lines = [*texts[:10], texts[0] + "  \r\n", " \n"]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in lines))
    (folder / "b.txt").write_text(texts[10])
    return folder


def all_bytes(folder: Path) -> dict[str, bytes]:
    files = [p for p in folder.rglob("*") if p.is_file()]
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def assert_whole(found: list[str], texts: list[str]) -> None:
    """The texts are there, one of them in two parts with nothing but space between."""
    assert len(found) == len(texts) + 1
    (cut,) = set(texts) - set(found)
    head, tail = (text for text in found if text not in texts)
    assert cut.startswith(head)
    assert cut.endswith(tail)
    assert not cut[len(head) : len(cut) - len(tail)].strip()


def test_end_to_end_rerun_and_conflict(tmp_path: Path, inputs: Path) -> None:
    out = tmp_path / "out"
    report = prepare(inputs, out, SMALL)
    assert (report.documents, report.duplicates, report.empty, report.skipped) == (11, 1, 1, 0)
    tokenizer = load_tokenizer(report.tokenizer_dir)
    assert report.vocab_size == tokenizer.vocab_size == SMALL.vocab_size
    assert report.validation_prefix is not None
    found: list[str] = []
    for prefix, count in (
        (report.train_prefix, report.train),
        (report.validation_prefix, report.validation),
    ):
        store = TokenStore(prefix)
        texts = [tokenizer.decode(store.tokens[a : b - 1].tolist()) for a, b in store.documents()]
        assert count.documents == len(texts)
        assert count.text_bytes == sum(len(t.encode()) for t in texts)
        assert count.tokens == store.num_tokens
        found += texts
        if prefix == report.train_prefix:  # the tokenizer saw the training split alone
            retrained = train_bpe(texts, report.config.vocab_size)
            assert retrained.get_vocab() == tokenizer.get_vocab()
    assert_whole(found, [normalize_text(d.text) for d in list(python_topics())[:11]])
    before = all_bytes(out)
    assert sorted(before) == [
        "dropped.jsonl", "prepared.toml", "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
        *(f"{side}/tokens.{kind}" for side in ("train", "validation") for kind in KINDS),
    ]  # fmt: skip

    again = prepare([inputs / "a.jsonl", inputs / "b.txt"], out, SMALL)
    assert again.reused
    assert (again.train, again.validation, again.config) == (
        report.train, report.validation, SMALL,
    )  # fmt: skip
    os.utime(inputs / "b.txt", (1, 1))  # another time, the same bytes
    assert prepare(inputs, out, SMALL).reused
    with pytest.raises(
        ConfigError, match=r"out.*vocab_size=400 in that corpus, 500 now.*overwrite"
    ):
        prepare(inputs, out, PrepareConfig(vocab_size=500, validation_fraction=0.2))
    with pytest.raises(ConfigError, match="other input text"):
        prepare(inputs / "a.jsonl", out, SMALL)
    with pytest.raises(ConfigError, match=r"other input text.*pydoc_data"):
        prepare(None, out, SMALL)
    assert all_bytes(out) == before
    smaller = prepare(inputs / "a.jsonl", out, SMALL, overwrite=True)
    assert (smaller.reused, smaller.documents) == (False, 10)
    assert prepare(inputs / "a.jsonl", out, SMALL).reused


def test_two_preparations_are_equal_byte_for_byte(tmp_path: Path, inputs: Path) -> None:
    for name in ("one", "two"):
        prepare(inputs, tmp_path / name, SMALL)
    assert all_bytes(tmp_path / "one") == all_bytes(tmp_path / "two")


def test_python_topics_by_default(tmp_path: Path) -> None:
    report = prepare(None, tmp_path, PrepareConfig(vocab_size=300, validation_fraction=0.1))
    total = report.train.text_bytes + report.validation.text_bytes
    assert total > 400_000
    assert abs(report.validation.text_bytes / total - 0.1) < 0.02
    assert prepare(None, tmp_path, report.config).reused


def test_skip_bad_is_counted(tmp_path: Path, inputs: Path) -> None:
    path = inputs / "a.jsonl"
    path.write_text("{oops\n" + path.read_text())
    with pytest.raises(DataError, match=r"a\.jsonl:1"):
        prepare(inputs, tmp_path / "out", SMALL)
    assert all_bytes(tmp_path / "out") == {}
    config = PrepareConfig(vocab_size=400, validation_fraction=0.2, skip_bad=True)
    assert prepare(inputs, tmp_path / "out", config).skipped == 1
    assert prepare(inputs, tmp_path / "out", config).skipped == 1


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_few_documents_are_held_out_by_bytes(tmp_path: Path, count: int) -> None:
    """Of few files one is cut: together they are what they were, and about a tenth is held out."""
    folder = tmp_path / "in"
    folder.mkdir()
    texts = [normalize_text(d.text) for d in python_topics() if len(d.text) > 3000][:count]
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    config = PrepareConfig(vocab_size=300, validation_fraction=0.1)
    report = prepare(folder, tmp_path / "out", config)
    assert report.validation_prefix is not None
    assert report.documents == count
    assert 0.05 < report.held_out_ratio < 0.15
    tokenizer = load_tokenizer(report.tokenizer_dir)
    found = []
    for prefix in (report.train_prefix, report.validation_prefix):
        store = TokenStore(prefix)
        found += [tokenizer.decode(store.tokens[a : b - 1].tolist()) for a, b in store.documents()]
    assert_whole(found, texts)
    assert prepare(folder, tmp_path / "out", config).held_out_ratio == report.held_out_ratio


def test_nothing_is_held_out_of_next_to_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("ab")
    report = prepare(tmp_path / "a.txt", tmp_path / "out", PrepareConfig(vocab_size=300))
    assert report.validation_prefix is None
    assert "there is no validation data" in caplog.text


def test_what_is_not_read_is_named(
    tmp_path: Path,
    inputs: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kinds of file that are not read, by name and size; most of the input is refused."""
    (inputs / "sub").mkdir()
    (inputs / "sub" / "one.png").write_bytes(b"x" * 1500)
    (inputs / "two.png").write_bytes(b"x" * 500)
    (inputs / "README").write_bytes(b"x" * 10)
    (inputs / ".hidden.png").write_bytes(b"x" * 10**6)
    prepare(inputs, tmp_path / "out", SMALL)
    for words in (
        "2.01 kB of 45.09 kB of the input",
        "one.png and 1 more .png (2.00 kB)",
        "README (10 bytes",
    ):
        assert words in caplog.text
    (inputs / "table.npz").write_bytes(b"x" * 10**6)
    with pytest.raises(
        DataError, match=r"unsupported formats: table\.npz \(1\.00 MB\), .*--skip-unread"
    ):
        prepare(inputs, tmp_path / "most", SMALL)
    assert not (tmp_path / "most").exists()
    allowed = replace(SMALL, skip_unread=True)
    assert prepare(inputs, tmp_path / "most", allowed).documents == 11
    with pytest.raises(DataError, match="contains no input file"):
        prepare(inputs / "sub", tmp_path / "none", SMALL)


def test_strange_output_directories(tmp_path: Path, inputs: Path) -> None:
    foreign = tmp_path / "foreign"
    (foreign / "train").mkdir(parents=True)
    (foreign / "train" / "tokens.bin").write_bytes(b"mine")
    (foreign / "notes.txt").write_text("keep me")
    with pytest.raises(ConfigError, match=r"contains notes\.txt, train but no prepared\.toml"):
        prepare(inputs, foreign, SMALL)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("keep me")
    with pytest.raises(ConfigError, match=r"notes\.txt but no prepared\.toml.*--overwrite"):
        prepare(inputs, mine, SMALL)
    assert all_bytes(mine) == {"notes.txt": b"keep me"}
    assert (foreign / "train" / "tokens.bin").read_bytes() == b"mine"
    prepare(inputs, foreign, SMALL, overwrite=True)
    assert (foreign / "notes.txt").read_text() == "keep me"
    (foreign / "train" / "tokens.bin").write_bytes(b"")
    with pytest.raises(DataError, match="index needs"):
        prepare(inputs, foreign, SMALL)
    (foreign / "prepared.toml").write_text("format = 3\n")
    with pytest.raises(DataError, match="format 3"):
        prepare(inputs, foreign, SMALL)
    with pytest.raises(ConfigError, match="is a file"):
        prepare(inputs, foreign / "notes.txt", SMALL)


def test_interrupted_preparation_is_done_again(
    tmp_path: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    prepare_module = sys.modules["bmforge.data.prepare.run"]
    move = prepare_module._move_into_place  # type: ignore[attr-defined]

    def stop_halfway(work: Path, target: Path) -> None:
        (target / "train").mkdir()
        (work / "train/tokens.bin").replace(target / "train/tokens.bin")
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare_module, "_move_into_place", stop_halfway)
    with pytest.raises(KeyboardInterrupt):
        prepare(inputs, out, SMALL)
    assert (out / "preparing.tmp").exists()
    monkeypatch.setattr(prepare_module, "_move_into_place", move)
    assert not prepare(inputs, out, SMALL).reused
    assert prepare(inputs, out, SMALL).reused
    assert not (out / "preparing.tmp").exists()


def test_nothing_left_after_cleaning(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": " \\n"}\n')
    with pytest.raises(DataError, match="no text is left"):
        prepare(tmp_path / "a.jsonl", tmp_path / "out", SMALL)


def test_a_given_tokenizer_is_kept_as_it_is(tmp_path: Path, inputs: Path) -> None:
    """Its limits cut no document, its files are copied, and its own end token ends documents."""
    whole = prepare(inputs, tmp_path / "whole", SMALL)
    given = tmp_path / "given"
    tokenizer = Tokenizer.from_file(str(whole.tokenizer_dir / "tokenizer.json"))
    tokenizer.enable_truncation(8)
    given.mkdir()
    text = tokenizer.to_str().replace("<|endoftext|>", "</s>")
    (given / "tokenizer.json").write_text(text, encoding="utf-8")
    (given / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}}')
    settings = PrepareConfig(validation_fraction=0.2, tokenizer=str(given))
    again = prepare(inputs, tmp_path / "again", settings)
    assert (again.train, again.validation) == (whole.train, whole.validation)
    assert (again.eos_id, all_bytes(again.tokenizer_dir)) == (0, all_bytes(given))
    (given / "tokenizer_config.json").unlink()
    with pytest.raises(DataError, match="eos_token"):
        prepare(inputs, tmp_path / "endless", settings)

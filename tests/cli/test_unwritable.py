"""Places that cannot be written, and readers that go away: a sentence, or nothing at all."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from bmforge.cli import main
from bmforge.data import TokenStoreWriter
from bmforge.models import GPT2, GPT2Config

SIZES = {"vocab_size": 50, "hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_seq_len": 32}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a corpus, a run's figures and a file, below which nothing can be made."""
    root = tmp_path_factory.mktemp("place")
    GPT2.from_config(GPT2Config(**SIZES)).save_pretrained(root / "gpt2")
    with TokenStoreWriter(root / "tokens", vocab_size=50) as writer:
        writer.add_item(list(range(50)))
        writer.end_document()
    (root / "texts").mkdir()
    (root / "texts" / "a.txt").write_text("one two three " * 50)
    (root / "run" / "report.html").mkdir(parents=True)  # where a file is to be written
    (root / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (root / "file").write_text("not a directory")
    return root


TRAIN = "train pretrain --model {root}/gpt2 --data {root}/tokens --seq-len 8 --steps 1 --run-dir"
SMALL = "plan gpt2 --set num_layers=2 --gpus 1 --gpu v100-16gb --plot"


@pytest.mark.parametrize(
    ("line", "bad", "words"),
    [
        ("prepare {root}/texts --out", "{root}/file", "is a file"),
        ("prepare {root}/texts --out", "{root}/file/x", "out_dir="),
        ("quickstart --input {root}/texts --run-dir", "{root}/file/x", "file' is not a directory"),
        (TRAIN, "{root}/file", "run_dir="),
        (TRAIN, "{root}/file/x/y", "run_dir="),
        ("convert {root}/gpt2", "{root}/file/x", "target="),
        ("report", "{root}/run", "report.html'"),
        (SMALL, "{root}/file/x.svg", "plot="),
        # Of the kernel: no one can write there, and only the attempt shows it.
        ("prepare {root}/texts --out", "/proc/nobody/x", "No such file or directory: '/proc"),
        ("convert {root}/gpt2", "/proc/nobody", "No such file or directory: '/proc"),
        (TRAIN, "/proc/nobody", "No such file or directory: '/proc"),
    ],
)
def test_what_cannot_be_written_is_one_sentence(
    line: str, bad: str, words: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "/proc" in bad and not Path("/proc/self").exists():
        pytest.skip("no /proc here")
    before = sorted(place.rglob("*"))
    assert main([*line.format(root=place).split(), bad.format(root=place)]) == 2
    said = capsys.readouterr().err
    (told,) = [text for text in said.splitlines() if text.startswith("error: ")]
    assert words in told
    assert "Traceback" not in said
    assert [p for p in sorted(place.rglob("*")) if p.suffix != ".tmp"] == before


def test_a_place_that_is_not_ours(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may write everywhere is told that he may not."""
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != place)
    assert main(["convert", str(place / "gpt2"), str(place / "new" / "out")]) == 2
    assert "no permission to write in" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["--help", "info gpt2", "prepare --help", "train --help"])
def test_a_closed_pipe_is_quiet(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`bmforge info gpt2 | head`: the status is that of other programs, and nothing is said."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(line.split()) == 128 + signal.SIGPIPE
        pipe.flush()  # what was left goes nowhere
    assert capsys.readouterr().err == ""

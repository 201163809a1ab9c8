"""Standard input as a source: what it is taken for, and the same work as of a file."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path

import pytest

from bmforge.data import PrepareConfig, prepare
from bmforge.data.prepare import stages
from bmforge.errors import ConfigError, DataError

CONFIG = PrepareConfig(vocab_size=300, validation_fraction=0.2, shard_bytes=700)
LINES = "".join(json.dumps({"text": f"text number {n} " * (1 + n % 7)}) + "\n" for n in range(60))


class Pipe(io.TextIOWrapper):
    """Stands for what a pipe gives."""

    def __init__(self, data: bytes, terminal: bool = False) -> None:
        super().__init__(io.BytesIO(data), "utf-8")
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def send(monkeypatch: pytest.MonkeyPatch, data: bytes, terminal: bool = False) -> None:
    monkeypatch.setattr("sys.stdin", Pipe(data, terminal))


def tokens(out: Path) -> dict[str, bytes]:
    files = (*out.glob("*/tokens.*"), *out.glob("tokenizer/*"))
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in files if p.suffix != ".doc"}


@pytest.mark.parametrize("pack", [False, True])
def test_lines_are_those_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: bool
) -> None:
    data = gzip.compress(LINES.encode()) if pack else LINES.encode()
    path = tmp_path / ("a.jsonl.gz" if pack else "a.jsonl")
    path.write_bytes(data)
    prepare(path, tmp_path / "file", CONFIG)
    send(monkeypatch, data)
    report = prepare("-", tmp_path / "pipe", CONFIG)
    assert report.documents == 60
    assert tokens(tmp_path / "pipe") == tokens(tmp_path / "file")
    assert not (tmp_path / "pipe" / "preparing.tmp").exists()
    send(monkeypatch, data)
    assert prepare(["-"], tmp_path / "pipe", CONFIG).reused
    assert not (tmp_path / "pipe" / "preparing.tmp").exists()
    send(monkeypatch, data + b'{"text": "more"}\n')
    with pytest.raises(ConfigError, match="other input text"):
        prepare("-", tmp_path / "pipe", CONFIG)


def test_a_text_and_a_file_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text(LINES)
    send(monkeypatch, "春眠不觉晓，处处闻啼鸟。".encode() * 20)
    report = prepare([tmp_path / "a.jsonl", "-"], tmp_path / "out", CONFIG)
    assert report.documents == 61


def test_work_goes_on_when_it_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(monkeypatch, LINES.encode())
    prepare("-", tmp_path / "whole", CONFIG)

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(stages, "train_bpe", stop)
        send(monkeypatch, LINES.encode())
        with pytest.raises(KeyboardInterrupt):
            prepare("-", tmp_path / "out", CONFIG)
    journal = (tmp_path / "out" / "preparing.tmp" / "journal.jsonl").read_bytes()
    assert b'"documents"' in journal
    send(monkeypatch, LINES.encode())
    with monkeypatch.context() as patched:
        patched.setattr(stages, "make_documents", stop)  # it is done
        prepare("-", tmp_path / "out", CONFIG)
    assert tokens(tmp_path / "out") == tokens(tmp_path / "whole")


def test_what_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send(monkeypatch, b"", terminal=True)
    with pytest.raises(ConfigError, match="Pipe a text"):
        prepare("-", tmp_path / "out", CONFIG)
    send(monkeypatch, b"x")
    with pytest.raises(ConfigError, match="Pass '-' only once"):
        prepare(["-", "-"], tmp_path / "out", CONFIG)
    send(monkeypatch, b"")
    with pytest.raises(DataError, match="is empty"):
        prepare("-", tmp_path / "out", CONFIG)
    assert not (tmp_path / "out").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "note").write_text("x")
    send(monkeypatch, LINES.encode())
    with pytest.raises(ConfigError, match="contains note"):
        prepare("-", tmp_path / "mine", CONFIG)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["note"]

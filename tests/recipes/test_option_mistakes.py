"""Mistakes in the options of a first run: one sentence of advice, and no files are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_adapter_runs import write_qwen3

from bmforge.cli import main

ASKED = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3(tmp_path_factory.mktemp("base") / "Qwen3-tiny")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", b"", "no training example in data.paths=['empty.jsonl']"),
        ("empty.json", b"[]", "no training example in data.paths=['empty.json']"),
        ("picture.png", b"\x89PNG\r\n\x1a\n\xff\xd8", "'picture.png' is not a file of records"),
        ("text.jsonl", b"hello\n", "'text.jsonl', line 1 is not JSON"),
        ("object.json", b'{\n"messages": 1}', "line 1 is not JSON"),
        ("asked.jsonl", json.dumps({"messages": [ASKED]}).encode(), "no assistant message"),
        (None, b"", "the file 'missing.jsonl'"),
    ],
)
def test_a_wrong_data_file(
    name: str | None,
    content: bytes,
    message: str,
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if name is not None:
        Path(name).write_bytes(content)
    words = ["train", "conversations", "--model", str(base), "--data", name or "missing.jsonl"]
    assert main([*words, "--steps", "1", "--run-dir", "run"]) == 2
    last = capsys.readouterr().err.strip().splitlines()
    assert any(message in line and line.startswith("error: ") for line in last)
    assert not Path("run").exists()


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "info", "plan"])
def test_a_directory_without_a_model(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = ["--prompt", "hi"] if command == "generate" else []
    assert main([command, str(tmp_path), *prompt]) == 2
    assert "is not a model directory: it contains no config.json" in capsys.readouterr().err


def test_a_missing_task(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--model", "m", "--data", "d"]) == 2
    assert "error: the task is missing before --model" in capsys.readouterr().err
    assert main(["train", "conversation", "--model", "m"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: unknown task 'conversation'. Did you mean 'conversations'?")

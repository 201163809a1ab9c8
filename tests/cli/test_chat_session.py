"""`bmforge chat`: streaming, commands, hidden thoughts, saved conversations."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))

from test_adapter_runs import write_qwen3

from bmforge.cli import main
from bmforge.cli.chat import ThoughtFilter

PIECES = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "\n", "a", "<", "th", "ink>", "b c", "</", "think", ">"]
    ),
    max_size=12,
)


def remove_thoughts(text: str, is_inside: bool) -> str:
    """Remove thoughts from a whole text."""
    shown = ""
    while text:
        before, found, text = text.partition("</think>" if is_inside else "<think>")
        shown += "" if is_inside else before
        if found:
            text = text.lstrip("\n") if is_inside else text
            is_inside = not is_inside
    return shown


@given(pieces=PIECES, is_inside=st.booleans())
def test_thoughts_are_removed_however_the_text_is_cut(pieces: list[str], is_inside: bool) -> None:
    """Newlines that arrive in a later piece than the mark are kept; else it is the whole text's."""
    text = "".join(pieces)
    want = remove_thoughts(text, is_inside)
    for parts in ([text], list(text)):
        hidden = ThoughtFilter(is_inside)
        got = "".join([*(hidden.add(part) for part in parts), hidden.finish()])
        assert got.replace("\n", "") == want.replace("\n", "")
        if parts == [text]:
            assert got == want


def test_commands_of_a_conversation(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What is saved is the conversation; loading it and asking on is the same conversation."""
    model_directory = write_qwen3(tmp_path / "model")
    saved, again = tmp_path / "talk.json", tmp_path / "again.json"
    options = ["--max-new-tokens", "4", "--num-beams", "2"]

    def talk(*lines: str) -> list[str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        assert main(["chat", str(model_directory), *options]) == 0
        return capsys.readouterr().out.splitlines()

    talk("/system be kind", "ab", f"/save {saved}")
    messages = json.loads(saved.read_text())["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant"]
    assert messages[0]["content"] == "be kind"
    talk("/system be kind", "ab", "ba", f"/save {again}")
    want = json.loads(again.read_text())
    talk(f"/load {saved}", "ba", f"/save {again}")
    assert json.loads(again.read_text()) == want
    assert any("/system TEXT" in line for line in talk("/help"))
    monkeypatch.setattr("sys.stdin", io.StringIO("/nothing\n"))
    assert main(["chat", str(model_directory), *options]) == 2
    assert "unknown command" in capsys.readouterr().err


class Terminal(io.StringIO):
    """Standard output that is a terminal and keeps its pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return len(text)


def test_a_terminal_shows_the_text_of_a_pipe_token_by_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["chat", str(write_qwen3(tmp_path / "model")), "--max-new-tokens", "12", "--seed", "1"]
    monkeypatch.setattr("sys.stdin", io.StringIO("ab\n"))
    assert main(words) == 0
    whole = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("ab\n"))
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    assert main(words) == 0
    assert "".join(terminal.pieces).strip() == whole.strip()
    assert len([piece for piece in terminal.pieces if piece.strip()]) > 4


def read_until(terminal: int, mark: str, count: int = 1, limit_s: float = 120.0) -> str:
    """Read from a terminal until it has shown `mark` `count` times."""
    shown, end = "", time.monotonic() + limit_s
    while shown.count(mark) < count:
        assert time.monotonic() < end, shown
        shown += os.read(terminal, 4096).decode(errors="replace")
    return shown


def test_lines_are_edited_and_earlier_lines_come_back(tmp_path: Path) -> None:
    """Arrow keys and backspace edit a line; a wrong command does not end the conversation."""
    pty = pytest.importorskip("pty")
    pytest.importorskip("readline")
    folder, saved = write_qwen3(tmp_path / "model"), tmp_path / "talk.json"
    program, shell = pty.openpty()
    command = [sys.executable, "-m", "bmforge", "chat", str(folder), "--max-new-tokens", "2"]
    environment = {**os.environ, "TERM": "xterm", "INPUTRC": "/dev/null"}
    process = subprocess.Popen(
        command, stdin=shell, stdout=shell, stderr=shell, env=environment, start_new_session=True
    )
    os.close(shell)
    left, up, backspace = b"\x1b[D", b"\x1b[A", b"\x7f"
    lines = [
        *(b"gone", b"/clear", b"ac" + left + b"b", b"xyz" + backspace, up + up + b"d", b"/nothing"),
        f"/save {saved}".encode(),
    ]
    try:
        shown = read_until(program, "> ")
        for line in lines:
            os.write(program, line + b"\r")
            shown += read_until(program, "> ")
        os.write(program, b"/exit\r")
        assert process.wait(60) == 0, shown
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(program)
    messages = json.loads(saved.read_text())["messages"]
    asked = [message["content"] for message in messages if message["role"] == "user"]
    assert asked == ["abc", "xy", "abcd"], shown
    assert "error: unknown command '/nothing'" in shown

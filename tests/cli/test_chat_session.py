"""`bmforge chat`: streaming, commands, hidden thoughts, saved conversations."""

from __future__ import annotations

import io
import json
import sys
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

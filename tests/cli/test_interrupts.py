"""Ctrl-C during the start of a command ends it with one sentence, not with a traceback."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bmforge.cli import main
from bmforge.interrupts import before_output

SENTENCE = "stopped before any output was written.\n"
# Code of a module that is imported in place of the real one: Ctrl-C comes during its import.
INTERRUPTED = "import signal; signal.raise_signal(signal.SIGINT)"
# The module ignores Ctrl-C, and is therefore incomplete, as numpy when torch imports it.
IGNORED = """
import signal
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    pass
"""
CHATS = """{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
"""


def catch_ctrl_c() -> None:
    """Undo what a shell does to programs in the background, which ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("module", "source", "command"),
    [
        ("tyro", INTERRUPTED, "generate gpt2 --prompt a"),
        ("torch", INTERRUPTED, "generate gpt2 --prompt a"),
        ("torch", INTERRUPTED, "train pretrain --model gpt2"),
        ("torch", IGNORED, "train pretrain --model gpt2"),
    ],
)
def test_during_imports(module: str, source: str, command: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text(source)
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "bmforge", *command.split()],
        env={**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        preexec_fn=catch_ctrl_c,
    )
    loading = "" if module == "tyro" else "loading PyTorch ...\n"
    assert (done.returncode, done.stdout, done.stderr) == (130, "", loading + SENTENCE)
    assert [path.name for path in tmp_path.iterdir()] == [f"{module}.py"]


@pytest.mark.parametrize(
    "place",
    [
        "cli.train_run.find_recipe",
        "recipes.run.check_options",
        "recipes.run.read_data",
        "recipes.run.build_model",
    ],
)
def test_before_a_run_writes(
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also while the data is read or the model is loaded: the run directory is removed again."""

    def stop(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text(CHATS)
    monkeypatch.setattr(f"bmforge.{place}", stop)
    if place.endswith("build_model"):
        monkeypatch.setattr("bmforge.recipes.run.read_data", lambda config, *_: (config, None))
    command = "train conversations --model llama-3.2-1b --data chats.jsonl --steps 1 --run-dir run"
    assert main(command.split()) == 130
    assert capsys.readouterr().err.endswith(SENTENCE)
    assert [path.name for path in tmp_path.iterdir()] == ["chats.jsonl"]


def test_only_ctrl_c_is_changed() -> None:
    """It is reported also if the code ignores it; the handler of a program is kept."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        check_interrupts()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, handler)


def check_interrupts() -> None:
    with pytest.raises(ImportError, match="cuda"), before_output():
        raise ImportError("cuda")
    ignored = contextlib.suppress(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt, match="stopped before any"), before_output(), ignored:
        signal.raise_signal(signal.SIGINT)

"""Progress: a live line in a terminal, a plain one now and then where there is none."""

from __future__ import annotations

import io
import logging
import re
import sys
import threading

import pytest

from bmforge import logging as progress


class Listener(logging.Handler):
    """Keeps what is said, and wakes who waits for it."""

    def __init__(self, wanted: int) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.wanted, self.enough = wanted, threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if len(self.lines) >= self.wanted:
            self.enough.set()


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Listener:
    heard = Listener(2)
    monkeypatch.setattr(progress.get_logger(), "handlers", [heard])
    return heard


def test_long_work_speaks_while_one_unit_takes_its_time(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing moves on, and lines come all the same; none after the end."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.001)
    before = set(threading.enumerate())
    with progress.ProgressBar("tokenise", 12) as bar:
        bar.advance(3, "77 tokens")
        listener.lines.clear()
        listener.enough.clear()
        assert listener.enough.wait(30)
    assert set(threading.enumerate()) <= before  # others may have ended meanwhile
    assert listener.lines[-1].startswith("tokenise: 3 of 12, 77 tokens (")
    listener.enough.clear()
    for _ in progress.track(["only"], "read"):
        assert listener.enough.wait(30)
    assert listener.lines[-1].startswith("read: 0 of 1 (")


def test_other_processes_are_silent(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setenv("RANK", "1")
    before = set(threading.enumerate())
    with progress.ProgressBar("tokenise"):
        assert set(threading.enumerate()) <= before  # others may have ended meanwhile
    assert listener.lines == []


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_the_time_left_is_on_the_live_line(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 60 columns cuts the text, and not the time."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    with progress.ProgressBar("train", 600) as bar:
        bar.advance(12, "step 12/600  loss 3.1416  1,234 tokens/s  1.25 GB  ETA 1:02:03")
    drawn = re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", screen.getvalue()).splitlines()
    last = [line for line in drawn if "12/600" in line][-1]
    for word in ("train", "12/600", "-:--:--", "step 12"):
        assert word in last
    assert ("ETA 1:02:03" in last) == (columns == 140)

"""Signals that end a run after its step: Ctrl-C, SIGTERM, and SIGHUP of a closed terminal."""

from __future__ import annotations

import os
import signal

import pytest

from bmforge.train.signals import StopRequest

NAMES = [name for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


@pytest.mark.parametrize("name", NAMES)
def test_a_signal_asks_to_stop_and_a_second_one_stops(name: str) -> None:
    number = getattr(signal, name)
    default = signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL
    before = signal.signal(number, default)  # a shell ignores SIGINT for programs behind it
    try:
        with StopRequest() as stop:
            assert stop.asked is None
            os.kill(os.getpid(), number)
            assert stop.asked == name
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), number)
        assert signal.getsignal(number) == default
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("name", NAMES)
def test_an_ignored_signal_stays_ignored(name: str) -> None:
    """Nohup ignores SIGHUP, so that a run survives the end of its terminal."""
    number = getattr(signal, name)
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), number)
            assert stop.asked is None
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)

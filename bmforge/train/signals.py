"""Stops a run after its current step on SIGINT, SIGTERM or SIGHUP, immediately on a second one."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["StopRequest"]

# SIGHUP is sent when the terminal is closed; Windows has no such signal.
_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


class StopRequest:
    """Context manager whose attribute `asked` is the name of the received stop signal, if any."""

    def __init__(self) -> None:
        self.asked: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        # Handlers can only be set by the main thread; other threads leave them unchanged.
        if threading.current_thread() is threading.main_thread():
            # A signal that is ignored stays ignored, so that nohup works.
            ignored = [s for s in _SIGNALS if signal.getsignal(s) is signal.SIG_IGN]
            caught = [s for s in _SIGNALS if s not in ignored]
            self._before = {s: signal.signal(s, self._note) for s in caught}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None:
            raise KeyboardInterrupt
        self.asked = signal.Signals(number).name

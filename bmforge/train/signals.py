"""Ctrl-C and SIGTERM ask a run to stop after the step under way; a second one stops it at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["StopRequest"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Context manager whose `asked` tells whether a stop signal has come."""

    def __init__(self) -> None:
        self.asked: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        # Handlers can only be set by the main thread; elsewhere the program keeps its own.
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._note) for s in _SIGNALS}
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

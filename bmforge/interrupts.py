"""Ctrl-C during the start of a command, in which no output was written yet."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["before_output"]


@contextmanager
def before_output() -> Iterator[None]:
    """Context manager for the start of a command: Ctrl-C raises an error that says so.

    The import of an extension module can turn a `KeyboardInterrupt` into another error, or ignore
    it and leave a module half imported, so the signal itself is recorded.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed; the message says that no output was written.
    """
    is_interrupted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal is_interrupted
        is_interrupted = True
        signal.default_int_handler(number, frame)

    # Handlers can only be set by the main thread, and a program may have its own.
    is_main = threading.current_thread() is threading.main_thread()
    is_set = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_set:
        signal.signal(signal.SIGINT, note)
    cause: BaseException | None = None
    try:
        yield
    except BaseException as error:
        if not is_interrupted and not isinstance(error, KeyboardInterrupt):
            raise
        cause, is_interrupted = error, True
    finally:
        if is_set:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if is_interrupted:
        raise KeyboardInterrupt("stopped before any output was written.") from cause

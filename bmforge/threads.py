"""Threads in the background that end before the interpreter does.

A daemon thread that is inside an operation of torch when the interpreter ends is killed as it comes
back, its C++ frames with it: the process aborts, and a program that ended well counts as failed.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["start_thread"]

_RUNNING: dict[threading.Thread, Callable[[], None]] = {}


def start_thread(
    name: str, run: Callable[..., None], *arguments: Any, end: Callable[[], None]
) -> threading.Thread:
    """Start a thread that nobody has to wait for; return it.

    Args:
        name: of the thread.
        run: what it does.
        arguments: of `run`.
        end: asks it to end soon. It is called as the interpreter ends, if the thread runs still,
            which is waited for then.
    """
    thread = threading.Thread(target=_run_listed, args=(run, *arguments), name=name, daemon=True)
    _RUNNING[thread] = end
    thread.start()
    return thread


def _run_listed(run: Callable[..., None], *arguments: Any) -> None:
    try:
        run(*arguments)
    finally:
        _RUNNING.pop(threading.current_thread(), None)


@atexit.register
def _end_all() -> None:
    # The last first: one may wait for what an earlier one does.
    for thread, end in reversed(list(_RUNNING.items())):
        end()
        thread.join()

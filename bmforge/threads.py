"""Background threads that end before the interpreter does.

A daemon thread inside a torch operation at interpreter exit is killed when the operation returns,
with its C++ frames: the process aborts, and a successful program counts as failed.
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
    """Start and return a thread that is stopped and joined at interpreter exit.

    Args:
        name: name of the thread.
        run: function to run.
        arguments: positional arguments of `run`.
        end: function that requests the thread to end soon; called at interpreter exit if the thread
            still runs, and then waited for.
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
    # In reverse order of start: a thread may wait for the work of an earlier one.
    for thread, end in reversed(list(_RUNNING.items())):
        end()
        thread.join()

"""Background threads that end before the interpreter does.

A daemon thread that is inside a torch operation at interpreter exit is killed when the operation
returns, in the middle of C++ code. The process then aborts, and a successful program is reported as
failed.
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
        arguments: positional arguments for `run`.
        end: function that asks the thread to end soon. If the thread still runs at interpreter
            exit, `end` is called and the thread is joined.
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

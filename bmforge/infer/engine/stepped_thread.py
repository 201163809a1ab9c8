"""Runs a blocking function on a thread, step by step, from one `pause` to the next."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["SteppedThread"]


class _Stopped(BaseException):
    """Raised inside a canceled function.

    It is a BaseException, so that `except Exception` does not catch it.
    """


class SteppedThread:
    """Runs a blocking function from one `pause` to the next.

    Either the function's thread or the caller's thread runs, never both.

    Args:
        work: function that calls `pause`.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        # Two semaphores hand one turn back and forth. Only the thread that has the turn runs, so
        # the function and its caller need no other locks.
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._is_stopped = self._is_over = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="bmforge-turns", daemon=True)

    def step(self) -> bool:
        """Run the function until its next `pause`; return True if it has not ended.

        Raises:
            Exception: an exception that the function raised.
        """
        if self._is_over:
            return False
        if self._thread.ident is None:
            self._thread.start()
        self._turn.release()
        self._back.acquire()
        if self._is_over:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return not self._is_over

    def stop(self) -> None:
        """End the function at its `pause`; context managers and finally blocks are executed."""
        self._is_stopped = True
        if self._thread.ident is None:
            self._is_over = True
        # A loop, because `finally` blocks of the function may call `pause` again.
        while not self._is_over:
            self._turn.release()
            self._back.acquire()
        if self._thread.ident is not None:
            self._thread.join()

    def pause(self) -> None:
        """Wait for the next step; does nothing on other threads."""
        if threading.current_thread() is not self._thread:
            return
        self._back.release()
        self._turn.acquire()
        if self._is_stopped:
            raise _Stopped

    def _run(self) -> None:
        self._turn.acquire()
        try:
            if not self._is_stopped:
                self._work()
        except _Stopped:
            pass
        except Exception as error:
            self._error = error
        finally:
            # Set before the release: the caller reads it as soon as it has the turn.
            self._is_over = True
            self._back.release()

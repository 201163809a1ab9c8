"""Prepares the next items in a background thread while the caller uses the current one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from bmforge.threads import start_thread

__all__ = ["Prefetcher"]

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Computes ``make(first)``, ``make(first + 1)``, ... in a thread, ahead of `take`.

    Args:
        make: pure function of the item's index; runs in the thread.
        first: index of the first item.
        depth: largest number of finished items in the queue, at least 1.
    """

    def __init__(self, make: Callable[[int], T], first: int, depth: int) -> None:
        self._make = make
        self._next = first
        self._depth = depth
        self._ready: deque[T] = deque()
        self._error: BaseException | None = None
        self._stopped = False
        self._changed = threading.Condition()
        self._thread = start_thread("bmforge-prefetch", self._run, end=self.stop)

    def take(self) -> T:
        """Return the next item; if `make` raised an exception for it, raise that exception."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error or self._stopped)
            if self._ready:
                item = self._ready.popleft()
                self._changed.notify_all()
                return item
        if self._error is not None:
            raise self._error
        raise RuntimeError("take() was called after stop(). Create a new prefetcher.")

    def stop(self) -> None:
        """Stop the thread and discard its items; may be called more than once."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._ready.clear()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or len(self._ready) < self._depth)
                if self._stopped:
                    return
            try:
                item = self._make(self._next)
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            self._next += 1
            with self._changed:
                self._ready.append(item)
                self._changed.notify_all()

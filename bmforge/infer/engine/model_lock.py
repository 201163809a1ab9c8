"""Exclusive lock on the model, held by the batch loop or by one synchronous call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from bmforge.errors import ConfigError
from bmforge.infer.engine.requests import Requests

__all__ = ["ModelLock"]


class ModelLock:
    """Lock on the model."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_shared = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Context manager: lock the model for the batch loop, waiting until it is free."""
        with self._lock:
            self._is_shared = True
            try:
                yield
            finally:
                self._is_shared = False

    @contextmanager
    def alone(self, what: str, requests: Requests | None) -> Iterator[None]:
        """Context manager: lock the model for one call, or between two steps of the batch loop.

        Args:
            what: name of the call for error messages.
            requests: batch loop; None if there is none.

        Raises:
            ConfigError: the model is in use.
        """
        # The engine's thread already holds the lock, which is not reentrant.
        if requests is not None and requests.on_engine_thread:
            yield
            return
        # The engine's thread releases the lock shortly after it delivered the last answer.
        ends = self._is_shared and requests is not None and not requests.is_busy
        if not self._lock.acquire(blocking=ends):
            raise ConfigError(
                f"{what} was called while another request is running, but the engine runs one "
                "direct call at a time. Read or close the running stream first, or use "
                "`submit` or `call`."
            )
        try:
            yield
        finally:
            self._lock.release()

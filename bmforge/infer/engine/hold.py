"""Who has the model: submitted requests together, or one other request alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from bmforge.errors import ConfigError
from bmforge.infer.engine.requests import Requests

__all__ = ["ModelLock"]


class ModelLock:
    """Lets one at a time have the model."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_shared = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Have the model for submitted requests; wait for whoever has it."""
        with self._lock:
            self._is_shared = True
            try:
                yield
            finally:
                self._is_shared = False

    @contextmanager
    def alone(self, what: str, requests: Requests | None) -> Iterator[None]:
        """Have the model for one request, or between two steps of submitted ones.

        Args:
            what: is asked.
            requests: what runs submitted ones, if there is any.

        Raises:
            ConfigError: somebody has it.
        """
        if requests is not None and requests.is_here:
            yield
            return
        # The engine's thread lets go a moment after the last answer was handed over.
        ends = self._is_shared and requests is not None and not requests.is_busy
        if not self._lock.acquire(blocking=ends):
            raise ConfigError(
                f"{what} was asked while another request runs: an engine takes one at a time. Read "
                "a stream to its end, or close it, first; or ask by `submit` or `call`."
            )
        try:
            yield
        finally:
            self._lock.release()

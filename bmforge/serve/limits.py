"""Limits on the number and rate of requests, per client and in total."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bmforge.serve.errors import RequestError, overload_error
from bmforge.serve.settings import ServeConfig

__all__ = ["Admission", "check_at_most"]

_RETRY_S = 2.0
_MINUTE_S = 60.0
_ROUNDING = 1e-9
_MOST_KNOWN = 4096


class Admission:
    """Admission control, which counts and limits concurrent requests.

    Args:
        config: limits.
        clock: monotonic time in seconds.

    Attributes:
        is_closing: True to reject new requests.
        count: number of admitted requests.
    """

    def __init__(self, config: ServeConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._grace_s, self._clock = config.load, config.timeouts.grace_s, clock
        self.is_closing = False
        self.count = 0
        self._by_key: dict[str, int] = {}
        # Key -> (remaining requests, time of the last request): a token bucket that is refilled
        # over time.
        self._left: dict[str, tuple[float, float]] = {}

    @contextmanager
    def enter(self, key: str, count: int = 1) -> Iterator[None]:
        """Context manager that admits a request, and counts it while it runs.

        Args:
            key: name of the client: its API key's name, or its address.
            count: number of engine requests, such as prompts.

        Raises:
            RequestError: this client (status 429), or all clients together (503), exceed a limit.
        """
        self._check(key, count)
        self.count += count
        self._by_key[key] = self._by_key.get(key, 0) + count
        try:
            yield
        finally:
            self.count -= count
            self._by_key[key] -= count
            if not self._by_key[key]:
                del self._by_key[key]

    @property
    def has_room(self) -> bool:
        """True if another request would be admitted."""
        return not self.is_closing and self.count < self._limits.max_requests

    def _check(self, key: str, count: int) -> None:
        limits = self._limits
        if self.is_closing:
            raise overload_error("the server is stopping.", self._grace_s)
        if self._by_key.get(key, 0) + count > limits.max_requests_per_key:
            raise overload_error(
                (
                    f"this client may have at most {limits.max_requests_per_key} requests running "
                    "or waiting. Send fewer requests, or retry later."
                ),
                _RETRY_S,
                429,
            )
        if self.count + count > limits.max_requests:
            raise overload_error(
                f"this server accepts at most {limits.max_requests} requests running or waiting. "
                "Retry later.",
                _RETRY_S,
            )
        self._take_turn(key)

    def _take_turn(self, key: str) -> None:
        """Take a token from the client's rate-limit bucket; raise an error if there is none."""
        most, now = self._limits.max_rate_per_min, self._clock()
        left, since = self._left.get(key, (float(most), now))
        left = min(float(most), left + (now - since) * most / _MINUTE_S)
        if left < 1 - _ROUNDING:
            raise overload_error(
                f"this client sent more than {most} requests within a minute. Retry later.",
                (1 - left) * _MINUTE_S / most,
                429,
            )
        self._left[key] = left - 1, now
        if len(self._left) > _MOST_KNOWN:  # forget clients whose buckets are full again
            since = now - _MINUTE_S
            self._left = {name: entry for name, entry in self._left.items() if entry[1] > since}


def check_at_most(name: str, count: int, most: int, what: str) -> None:
    """Raise `RequestError` if `count` is above `most`.

    Args:
        name: request field, for the error.
        count: number of items in the request.
        most: largest allowed number.
        what: plural noun for the items in the error message, such as "texts".
    """
    if count > most:
        raise RequestError(
            f"{name} contains {count} {what} (allowed: at most {most}). Send fewer in one request.",
            name,
            code="limit_exceeded",
        )

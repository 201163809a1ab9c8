"""Server metrics in Prometheus format."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from bmforge.infer.engine.request import Completion, OutputDelta, RequestsStatus

__all__ = ["Metrics", "TokenTimes"]

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
_TOKEN_SECONDS = (0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 3, 10)
_KEY_DIGITS = 12  # number of digits of the key's SHA-256


class Metrics:
    """Prometheus metrics of a server; several servers in a process have separate metrics."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "bmforge_requests",
            "Requests by path and status.",
            ("path", "status"),
            registry=registry,
        )
        self._seconds = Histogram(
            "bmforge_request_seconds",
            "Time from the arrival of a request to the end of its response.",
            ("path",), buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self._first = Histogram(
            "bmforge_first_token_seconds", "Time to first token.",
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self._between = Histogram(
            "bmforge_inter_token_seconds", "Time between two tokens of an answer.",
            buckets=_TOKEN_SECONDS, registry=registry,
        )  # fmt: skip
        self._queue = Histogram(
            "bmforge_queue_seconds", "Time from the arrival of a request to its first step.",
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self._by_key = Counter(
            "bmforge_key_tokens",
            "Tokens by API key (the first digits of its SHA-256).",
            ("key", "kind"),
            registry=registry,
        )
        self._tokens = Counter(
            "bmforge_tokens", "Prompt tokens, cached tokens and new tokens.", ("kind",),
            registry=registry,
        )  # fmt: skip
        self._ends = Counter(
            "bmforge_answers", "Answers by finish reason.", ("reason",), registry=registry
        )
        self._busy = Gauge(
            "bmforge_engine_requests", "Requests in the engine.", ("state",), registry=registry
        )
        self._pages = Gauge(
            "bmforge_engine_pages", "KV cache blocks.", ("state",), registry=registry
        )
        self._open = Gauge("bmforge_open_requests", "Admitted requests.", registry=registry)

    def note_request(self, path: str, status: int, seconds: float) -> None:
        """Count a finished HTTP request."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def note_first(self, seconds: float) -> None:
        """Record the time to first token."""
        self._first.observe(seconds)

    def note_between(self, seconds: float, count: int) -> None:
        """Record the time per output token for several tokens that arrived together."""
        for _ in range(count):
            self._between.observe(seconds / count)

    def note_queue(self, seconds: float) -> None:
        """Record how long a request waited for its first step."""
        self._queue.observe(seconds)

    def note_tokens(self, key: str, **counts: int) -> None:
        """Count tokens by kind (prompt, cached, new), in total and per API key."""
        for kind, count in counts.items():
            self._tokens.labels(kind).inc(count)
            self._by_key.labels(key[:_KEY_DIGITS] or "none", kind).inc(count)

    def note_answers(
        self,
        completions: Sequence[Sequence[Completion]],
        key: str = "",
        cancelled: str = "cancelled",
    ) -> None:
        """Count the tokens and finish reasons of answers.

        Args:
            completions: answers per prompt.
            key: name of the client's key; "" without keys.
            cancelled: reason that is counted for cancelled answers.
        """
        for answers in completions:
            first, new = answers[0], sum(len(answer.ids) for answer in answers)
            self.note_tokens(key, prompt=first.prompt_tokens, cached=first.cached_tokens, new=new)
            for answer in answers:
                reason = answer.finish_reason
                self._ends.labels(cancelled if reason == "cancelled" else reason).inc()

    def note_left(self, prompt_tokens: int = 0, new_tokens: int = 0, key: str = "") -> None:
        """Count a request whose client has disconnected, and the tokens computed for it."""
        self._ends.labels("left").inc()
        self.note_tokens(key, prompt=prompt_tokens, new=new_tokens)

    def write(self, status: RequestsStatus, count: int) -> tuple[bytes, str]:
        """Return all metrics as text, and their content type.

        Args:
            status: status of the engine.
            count: number of admitted, unfinished requests.
        """
        self._busy.labels("running").set(status.running)
        self._busy.labels("waiting").set(status.waiting)
        self._pages.labels("used").set(status.pages_used)
        self._pages.labels("free").set(status.pages_free)
        self._open.set(count)
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


class TokenTimes:
    """Records the arrival times of one request's tokens as metrics.

    Args:
        metrics: metrics of the server.
        begin_s: arrival time of the request on the monotonic clock.
        clock: monotonic time in seconds.
    """

    def __init__(
        self, metrics: Metrics, begin_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics, self._begin, self._clock = metrics, begin_s, clock
        self._last: dict[tuple[int, int], float] = {}
        self._started: set[int] = set()

    def note(self, number: int, pieces: Sequence[OutputDelta], started_s: float | None) -> None:
        """Record the arrival of new output.

        Args:
            number: index of the prompt in the request.
            pieces: new output of the prompt's answers.
            started_s: time of the prompt's first step on the monotonic clock; None before this
                step.
        """
        if started_s is not None and number not in self._started:
            self._started.add(number)
            self._metrics.note_queue(max(0.0, started_s - self._begin))
        now = self._clock()
        for piece in pieces:
            if not piece.ids:
                continue
            answer = number, piece.index
            if not self._last:
                self._metrics.note_first(now - self._begin)
            if answer in self._last:
                self._metrics.note_between(now - self._last[answer], len(piece.ids))
            self._last[answer] = now

"""Server metrics in Prometheus format."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from bmforge.infer.engine.request import Completion, RequestsStatus

__all__ = ["Metrics"]

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


class Metrics:
    """The metrics of one server; several servers in a process have separate ones."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "bmforge_requests",
            "Requests by path and status.",
            ("path", "status"),
            registry=registry,
        )
        self._seconds = Histogram(
            "bmforge_request_seconds", "Time to the end of a response.", ("path",),
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self._first = Histogram(
            "bmforge_first_token_seconds", "Time to first token.",
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
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

    def note_answers(self, completions: Sequence[Sequence[Completion]]) -> None:
        """Count the tokens and finish reasons of answers."""
        for answers in completions:
            self._tokens.labels("prompt").inc(answers[0].prompt_tokens)
            self._tokens.labels("cached").inc(answers[0].cached_tokens)
            for answer in answers:
                self._tokens.labels("new").inc(len(answer.ids))
                self._ends.labels(answer.finish_reason).inc()

    def note_left(self, prompt_tokens: int = 0, new_tokens: int = 0) -> None:
        """Count a request whose client has disconnected, and the tokens computed for it."""
        self._ends.labels("left").inc()
        self._tokens.labels("prompt").inc(prompt_tokens)
        self._tokens.labels("new").inc(new_tokens)

    def write(self, status: RequestsStatus, count: int) -> tuple[bytes, str]:
        """Return all metrics, and their content type.

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

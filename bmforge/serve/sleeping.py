"""An engine that gives its memory back while nobody asks."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from bmforge.infer import Engine
from bmforge.infer.engine.request import Handle, Request, RequestsStatus
from bmforge.logging import get_logger
from bmforge.models import AutoModel

__all__ = ["AnyEngine", "SleepingEngine"]


class SleepingEngine:
    """Opens an engine when it is asked for something, and closes it when it has been idle.

    It can be asked for what a server asks of an `Engine`, by any thread.

    Args:
        open_engine: makes the engine; it is called at once, so that what is wrong is said now.
        directory: of the model.
        idle_s: seconds without a request after which the engine is closed.
        clock: seconds from some beginning on.

    Attributes:
        model: without weights, for what must be known of it while the engine sleeps.
        config: of the engine.
        tokenizer: of the model.
        plan: where everything was when the engine was open last.
    """

    def __init__(
        self,
        open_engine: Callable[[], Engine],
        directory: Path,
        idle_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open, self._idle_s, self._clock = open_engine, idle_s, clock
        self._lock, self._users = threading.Lock(), 0
        self._engine: Engine | None = open_engine()
        self._last = clock()
        self.model: Any = AutoModel.describe_pretrained(directory)[0]
        self.config, self.plan = self._engine.config, self._engine.plan
        self.tokenizer = self._engine.tokenizer

    @property
    def is_open(self) -> bool:
        """Whether the engine has its memory."""
        return self._engine is not None

    def submit(self, request: Request) -> Handle:
        """As `Engine.submit` does."""
        return self._use(lambda engine: engine.submit(request))

    def call(self, function: Callable[[], Any]) -> Any:
        """As `Engine.call` does."""
        return self._use(lambda engine: engine.call(function))

    def submit_embed(self, inputs: Any, **options: Any) -> Future[Any]:
        """As `Engine.submit_embed` does."""
        return self._use(lambda engine: engine.submit_embed(inputs, **options))

    def submit_documents(self, documents: Any, **options: Any) -> Future[Any]:
        """As `Engine.submit_documents` does."""
        return self._use(lambda engine: engine.submit_documents(documents, **options))

    def requests_status(self) -> RequestsStatus:
        """As `Engine.requests_status` does; it wakes nobody."""
        with self._lock:
            engine = self._engine
            return RequestsStatus(0, 0, 0, 0) if engine is None else engine.requests_status()

    def doze(self) -> bool:
        """Close the engine if it has been idle for long enough; tell whether it is closed."""
        with self._lock:
            engine = self._engine
            if engine is None:
                return True
            status = engine.requests_status()
            if self._users or status.running or status.waiting:
                self._last = self._clock()
            if self._clock() - self._last < self._idle_s:
                return False
            self._engine = None
            engine.close()  # whoever asks now waits: two models need not fit
            del engine
            gc.collect()
        get_logger().info("engine: closed, as nobody has asked for %g s", self._idle_s)
        return True

    def close(self) -> None:
        """Close it for good."""
        with self._lock:
            if self._engine is not None:
                self._engine.close()

    def __enter__(self) -> SleepingEngine:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _use(self, work: Callable[[Engine], Any]) -> Any:
        with self._lock:
            if self._engine is None:
                self._engine = self._open()
            engine = self._engine
            self._users += 1
        try:
            return work(engine)
        finally:
            with self._lock:
                self._users -= 1
                self._last = self._clock()


AnyEngine = Engine | SleepingEngine

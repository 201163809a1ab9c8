"""Engine that is unloaded while idle and loaded again on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from bmforge.errors import BmforgeError
from bmforge.infer import Engine
from bmforge.infer.engine.request import Handle, Request, RequestsStatus
from bmforge.infer.engine.tasks import SteppedTask
from bmforge.logging import get_logger
from bmforge.models import AutoModel
from bmforge.serve.pauses import collect_all

__all__ = ["AnyEngine", "ReloadError", "IdleUnloadingEngine"]


class ReloadError(BmforgeError, RuntimeError):
    """Raised if an unloaded model could not be loaded again."""


class IdleUnloadingEngine:
    """Loads an engine on demand, and unloads it after an idle time.

    The class has the methods of `Engine` that the server needs; any thread may call them.

    Args:
        open_engine: function that creates the engine; it is also called by the constructor, so that
            errors are raised early.
        directory: directory of the model.
        idle_s: time in seconds without requests after which the engine is unloaded.
        clock: monotonic time in seconds.

    Attributes:
        model: model without weights, for its properties while the engine is unloaded.
        config: configuration of the engine.
        tokenizer: tokenizer of the model.
        plan: memory plan of the engine when it was last loaded.
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
        self._opening_error: Exception | None = None
        self._last = clock()
        self.model: Any = AutoModel.describe_pretrained(directory)[0]
        self.config, self.plan = self._engine.config, self._engine.plan
        self.tokenizer = self._engine.tokenizer

    @property
    def failure(self) -> BaseException | None:
        """Error that ended the engine's thread; None while it works or is unloaded."""
        engine = self._engine
        return None if engine is None else engine.failure

    @property
    def opening_error(self) -> Exception | None:
        """Error of the last attempt to load the engine; None if it succeeded."""
        return self._opening_error

    @property
    def is_open(self) -> bool:
        """True if the engine is loaded."""
        return self._engine is not None

    def submit(self, request: Request) -> Handle:
        """Submit a request; see `Engine.submit`."""
        return self._use(lambda engine: engine.submit(request))

    def call(self, function: Callable[[], Any]) -> Any:
        """Call a function in the engine's thread; see `Engine.call`."""
        return self._use(lambda engine: engine.call(function))

    def submit_embed(self, inputs: Any, **options: Any) -> Future[Any]:
        """Submit an embedding request; see `Engine.submit_embed`."""
        return self._use(lambda engine: engine.submit_embed(inputs, **options))

    def submit_task(self, make: Callable[[Any], SteppedTask]) -> Future[Any]:
        """Submit a task of the model; see `Engine.submit_task`."""
        return self._use(lambda engine: engine.submit_task(make))

    def submit_documents(self, documents: Any, **options: Any) -> Future[Any]:
        """Submit CPM-Bee documents; see `Engine.submit_documents`."""
        return self._use(lambda engine: engine.submit_documents(documents, **options))

    def requests_status(self) -> RequestsStatus:
        """Return the engine's request status, without loading an unloaded engine."""
        with self._lock:
            engine = self._engine
            return RequestsStatus(0, 0, 0, 0) if engine is None else engine.requests_status()

    def unload_if_idle(self) -> bool:
        """Unload the engine if it has been idle for `idle_s`; return True if it is unloaded."""
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
            engine.close()  # with the lock held, because two models may not fit into memory
            del engine
            collect_all()
        get_logger().info("engine: unloaded, because there was no request for %g s", self._idle_s)
        return True

    def close(self) -> None:
        """Close the engine permanently."""
        with self._lock:
            if self._engine is not None:
                self._engine.close()

    def __enter__(self) -> IdleUnloadingEngine:
        """Return the engine."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the engine."""
        self.close()

    def _use(self, work: Callable[[Engine], Any]) -> Any:
        with self._lock:
            if self._engine is None:
                try:
                    self._engine = self._open()
                except Exception as error:
                    self._opening_error = error
                    raise ReloadError(
                        "the model was unloaded while idle, and cannot be loaded again "
                        f"({type(error).__name__}: {error}). Check the files of the model, and "
                        "restart the server."
                    ) from error
                self._opening_error = None
            engine = self._engine
            self._users += 1
        try:
            return work(engine)
        finally:
            with self._lock:
                self._users -= 1
                self._last = self._clock()


AnyEngine = Engine | IdleUnloadingEngine

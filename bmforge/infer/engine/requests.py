"""Batch loop of the engine: one background thread runs the model for all requests.

Any thread may submit requests. Only the engine's thread runs the model; between two steps it
handles cancellations, deadlines and other calls.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

from bmforge.errors import BmforgeError, ConfigError, DataError
from bmforge.infer.engine.budget import EngineConfig
from bmforge.infer.engine.encodings import Encoding, Encodings
from bmforge.infer.engine.jobs import Job, PackedJobs
from bmforge.infer.engine.limit import total_tokens
from bmforge.infer.engine.prompts import PromptReader
from bmforge.infer.engine.request import Handle, Request, RequestsConfig, RequestsStatus
from bmforge.infer.engine.rows import UnbatchedRunner
from bmforge.infer.engine.tasks import SteppedTask
from bmforge.logging import get_logger
from bmforge.threads import start_thread

__all__ = ["Requests", "open_requests"]


def open_requests(
    model: Any,
    open_tokenizer: Callable[[], Any] | None,
    config: EngineConfig,
    *,
    is_limited: bool,
    turn: Callable[[], AbstractContextManager[Any]],
    draft: Any = None,
    is_shared: bool = True,
) -> Requests:
    """Create the batch loop for a model.

    Args:
        model: model that the engine runs.
        open_tokenizer: function that returns the model's tokenizer; None if there is none.
        config: limits of the engine.
        is_limited: whether the engine has a memory budget.
        turn: factory of context managers that lock the model.
        draft: draft model; None if there is none.
        is_shared: whether the caller has a reference to the model and may change its weights.
    """
    try:
        tokenizer = None if open_tokenizer is None else open_tokenizer()
    except DataError:  # requests with token ids need no tokenizer
        tokenizer = None
    limit = (config.max_rows, config.tokens_of(model)) if is_limited else None
    total = total_tokens(model, config, limit)
    reader = PromptReader(model, tokenizer, limit)
    requests = config.requests
    most = config.max_rows if is_limited else requests.max_num_seqs
    encodings = Encodings(
        model, most, max(requests.max_num_batched_tokens, config.tokens_of(model))
    )
    packed = PackedJobs(model, requests, total, draft, is_shared)
    return Requests(model, reader, tokenizer, requests, packed, turn, encodings)


class Requests:
    """Batch loop: runs a model for all requests on a background thread.

    Args:
        model: model that the engine runs.
        reader: object that validates requests and converts them to token ids.
        tokenizer: the model's tokenizer; None if there is none.
        config: limits of batched requests.
        packed: runner of the requests that are batched.
        turn: factory of context managers that lock the model; the lock is held while there are
            requests.
        encodings: runner of embedding requests.
    """

    def __init__(
        self,
        model: Any,
        reader: PromptReader,
        tokenizer: Any,
        config: RequestsConfig,
        packed: PackedJobs,
        turn: Callable[[], AbstractContextManager[Any]],
        encodings: Encodings,
    ) -> None:
        self._model, self._reader, self._tokenizer = model, reader, tokenizer
        self._config, self._turn = config, turn
        self._changed = threading.Condition()
        self._inbox: deque[Job] = deque()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._packed = packed
        self._rows: list[Job] = []
        self._encodings, self._works = encodings, deque[SteppedTask]()
        self._releases = reader.is_limited  # embeddings use the memory of the KV cache
        self._count = 0
        self._was_called = False
        self._is_closed = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def submit(self, request: Request) -> Handle:
        """Queue a request; see `Engine.submit`."""
        ready = self._reader.read(request)
        if len(ready.answers) > self._config.max_num_seqs:
            raise ConfigError(
                f"num_return_sequences={len(ready.answers)} is more than "
                f"max_num_seqs={self._config.max_num_seqs}. Request fewer answers, or create "
                "the engine with a larger RequestsConfig(max_num_seqs=)."
            )
        if ready.is_packed:
            self._packed.check(len(ready.ids) + ready.config.max_new_tokens)
        with self._changed:
            self._check_room("submit")
            self._count += 1
            job = Job(self._count, ready, time.monotonic())
            if not ready.is_packed:
                job.rows = UnbatchedRunner(self._model, self._tokenizer, ready)
            self._inbox.append(job)
            self._wake()
        return job.handle

    def add(self, task: Encoding | SteppedTask) -> Future[Any]:
        """Queue an embedding request or another task; return its future.

        Raises:
            ConfigError: the queue is full, or the engine is closed.
        """
        with self._changed:
            self._check_room("submit")
            if isinstance(task, Encoding):
                self._encodings.add(task)
            else:
                self._works.append(task)
            self._wake()
        return task.future

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function on the engine's thread between two steps; return its result."""
        if self.on_engine_thread:
            self._was_called = True
            return function()
        future: Future[Any] = Future()
        with self._changed:
            self._check_open("call")
            self._calls.append((function, future))
            self._wake()
        return future.result()

    def weights_changed(self) -> int:
        """Drop all cached keys and values; return the new version of the weights."""

        def drop() -> int:
            self._packed.notice_changes(has_changed=True)
            return self._packed.weights_version

        return self.call(drop)

    @property
    def weights_version(self) -> int:
        """Version of the weights: the number of detected changes of the model."""
        return self._packed.weights_version

    @property
    def on_engine_thread(self) -> bool:
        """Whether the caller runs on the engine's thread."""
        return threading.current_thread() is self._thread

    @property
    def is_busy(self) -> bool:
        """Whether there are unfinished requests."""
        jobs = [*self._inbox, *self._packed.jobs, *self._rows]
        tasks = self._calls or self._encodings or self._works
        return bool(tasks) or any(not job.is_done for job in jobs)

    @property
    def failure(self) -> BaseException | None:
        """Error that ended the engine's thread (also set by closing); None while it runs."""
        closed = (
            ConfigError("the engine was closed. Create a new engine.") if self._is_closed else None
        )
        return self._failure or closed

    def status(self) -> RequestsStatus:
        """Return the numbers of running and waiting requests and of used pages."""
        pages = self._packed.pages
        running = self._packed.running + sum(job.is_running for job in list(self._rows))
        return RequestsStatus(running, self._waiting(), pages.used, pages.available)

    def release(self) -> None:
        """Free memory that no request uses."""
        self._packed.release()

    def close(self) -> None:
        """End the thread; unfinished requests fail with an error."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None and not self.on_engine_thread:
            self._thread.join()

    def _waiting(self) -> int:
        rows = sum(not job.is_running for job in list(self._rows))
        tasks = self._encodings.waiting + len(self._works)
        return len(self._inbox) + self._packed.waiting + rows + tasks

    def _check_room(self, what: str) -> None:
        self._check_open(what)
        waiting = self._waiting()
        if waiting >= self._config.max_queue_size:
            raise ConfigError(
                f"the queue is full: {waiting} requests are waiting "
                f"(max_queue_size={self._config.max_queue_size}). Try again later."
            )

    def _check_open(self, what: str) -> None:
        if self._failure is not None:
            raise ConfigError(
                f"{what} was called on an engine that has failed ({self._failure!r}). Create a new "
                "engine."
            ) from self._failure
        if self._is_closed:
            raise ConfigError(f"{what} was called on a closed engine. Create a new engine.")

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = start_thread("bmforge-engine", self._run, end=self.close)
        self._changed.notify_all()

    def _has_work(self) -> bool:
        tasks = self._calls or self._encodings or self._works
        return bool(self._inbox or tasks or self._rows or self._packed.jobs)

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed or self._has_work())
                if self._is_closed:
                    break
                with self._turn():
                    while self._has_work() and not self._is_closed:
                        self._step()
        except BaseException as error:  # any error must end all waiting requests
            self._failure = error
            get_logger().error(
                "the engine stopped because of an error, and all its requests fail: %r", error
            )
        finally:
            self._end_all()

    def _step(self) -> None:
        """Accept requests, end cancelled and expired ones, run one step of those that remain."""
        if self._calls or self._was_called:
            self._was_called = False
            self._answer_calls()
            self._packed.notice_changes()
        while self._inbox:
            job = self._inbox.popleft()
            if job.rows is None:
                self._packed.add(job)
            else:
                self._packed.notice_changes()
                self._rows.append(job)
        now = time.monotonic()
        for job in [*self._packed.jobs, *self._rows]:
            reason = job.over(now)
            if reason is not None:
                self._packed.remove(job)
                job.end(reason)
        self._packed.step()
        self._step_rows()
        self._rows = [job for job in self._rows if not job.is_done]
        self._step_tasks()

    def _step_tasks(self) -> None:
        """Run a forward pass of the embedding requests, and a step of the oldest other task."""
        if not (self._encodings or self._works):
            return
        if self._releases:
            self._packed.release()
        self._encodings.step()
        while self._works and self._works[0].is_over:
            self._works.popleft()
        if self._works:
            self._works[0].step()
        for work in [work for work in self._works if work.is_over]:
            self._works.remove(work)

    def _step_rows(self) -> None:
        """Run one step of unbatched requests, oldest first, up to `max_num_seqs` sequences."""
        used = 0
        for job in self._rows:
            assert job.rows is not None
            if used and used + job.rows.count > self._config.max_num_seqs:
                break
            used += job.rows.count
            if job.is_done:
                continue
            if not job.is_running:
                for answer in job.ready.answers:
                    answer.weights_version = self._packed.weights_version
            job.is_running = True
            job.handle.note_start(time.monotonic())
            try:
                has_more = job.rows.step()
            except Exception as error:
                job.fail(error)
                continue
            job.tell(finished=not has_more)

    def _answer_calls(self) -> None:
        while self._calls:
            function, future = self._calls.popleft()
            try:
                future.set_result(function())
            except BaseException as error:  # the caller must not wait forever
                future.set_exception(error)
                if not isinstance(error, Exception):
                    raise

    def _end_all(self) -> None:
        """Fail all unfinished requests."""
        with self._changed:
            self._is_closed = True
            jobs = [*self._inbox, *self._packed.jobs, *self._rows]
            self._inbox.clear()
        reason = "was closed" if self._failure is None else f"failed ({self._failure!r})"
        for job in jobs:
            self._packed.remove(job)
            job.fail(
                _EndedError(
                    f"the engine {reason} while the request was running. Create a new engine."
                )
            )
        unfinished = f"the engine {reason} before the request was finished. Create a new engine."
        self._encodings.fail_all(_EndedError(unfinished))
        while self._works:
            self._works.popleft().fail(_EndedError(unfinished))
        while self._calls:
            self._calls.popleft()[1].set_exception(_EndedError(unfinished))


class _EndedError(BmforgeError, RuntimeError):
    """Raised for unfinished requests if the engine is closed or fails."""

"""Tasks of the batch loop that run one forward pass at a time, interleaved with requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from bmforge.infer.engine.stepped_thread import SteppedThread
from bmforge.tune.delta.selection import DeltaChoice, DeltaNames, check_names, choosing_deltas

__all__ = ["EngineTask", "SteppedTask", "stepped_task"]


class EngineTask:
    """Task with a future; cancelling the future ends the task before its next forward pass.

    Args:
        deadline_s: deadline in seconds from now, after which the task fails with `TimeoutError`;
            None for no deadline.

    Attributes:
        future: future of the result.
    """

    def __init__(self, deadline_s: float | None) -> None:
        self.future: Future[Any] = Future()
        self._seconds = deadline_s
        self._deadline_s = None if deadline_s is None else time.monotonic() + deadline_s
        self._is_answered = False

    @property
    def is_over(self) -> bool:
        """Whether the task has ended; fail the task first if its deadline has passed."""
        if self.future.cancelled() and not self._is_answered:
            self.stop()
        elif self._deadline_s is not None and time.monotonic() >= self._deadline_s:
            self.fail(
                TimeoutError(
                    f"the task was not finished after deadline_s={self._seconds}. "
                    "Increase deadline_s, or send less input."
                )
            )
        return self._is_answered or self.future.cancelled()

    def finish(self, result: Any) -> None:
        """Set the result of the future."""
        if self._begin_answer():
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Fail the task with an error."""
        if self._begin_answer():
            self.stop()
            self.future.set_exception(error)

    def stop(self) -> None:
        """Stop the work in progress."""

    def _begin_answer(self) -> bool:
        """Return True if the result may be set; afterwards the future cannot be cancelled."""
        if self._is_answered or not self.future.set_running_or_notify_cancel():
            return False
        self._is_answered = True
        return True


class SteppedTask(EngineTask):
    """Task that runs a blocking function, which waits for its turn before every forward pass.

    Args:
        model: model that the function calls.
        function: function to run.
        deadline_s: deadline in seconds, as in `EngineTask`.
        deltas: adapters that are active during the function, as in `Request`.
    """

    def __init__(
        self,
        model: Any,
        function: Callable[[], Any],
        deadline_s: float | None,
        deltas: DeltaNames = None,
    ) -> None:
        super().__init__(deadline_s)
        self._model, self._function, self._deltas = model, function, deltas
        self._turns = SteppedThread(self._work)
        self._result: Any = None

    def step(self) -> None:
        """Run the function until its next forward pass, or until it returns."""
        try:
            if not self._turns.step():
                self.finish(self._result)
        except Exception as error:
            self.fail(error)

    def stop(self) -> None:
        """Stop the function that the task runs."""
        self._turns.stop()

    def _work(self) -> None:
        handle = self._model.register_forward_pre_hook(lambda *_: self._turns.pause())
        try:
            with choosing_deltas(self._model, self._deltas):
                self._result = self._function()
        finally:
            handle.remove()


def stepped_task(
    function: Callable[[Any], Any], deadline_s: float | None, delta: DeltaChoice = None
) -> Callable[[Any], SteppedTask]:
    """Return the argument of `Engine.submit_task` for a function of the model.

    Args:
        function: function to run.
        deadline_s: deadline in seconds, as in `EngineTask`.
        delta: names of the active adapters, as in `Engine.generate`.
    """

    def make(model: Any) -> SteppedTask:
        return SteppedTask(model, partial(function, model), deadline_s, check_names(model, delta))

    return make

"""What is asked of an engine whole, and done a pass of the model at a time beside the rest."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from bmforge.infer.engine.turns import Turns
from bmforge.tune.delta.selection import DeltaNames, choosing_deltas

__all__ = ["Task", "Work"]


class Task:
    """Something that somebody waits for; cancelling the future ends it before the next pass.

    Args:
        deadline_s: seconds from now on after which it ends with a `TimeoutError`; None never ends.

    Attributes:
        future: what it comes to.
    """

    def __init__(self, deadline_s: float | None) -> None:
        self.future: Future[Any] = Future()
        self._seconds = deadline_s
        self._deadline_s = None if deadline_s is None else time.monotonic() + deadline_s
        self._is_answered = False

    @property
    def is_over(self) -> bool:
        """Whether it has ended; a late one ends now."""
        if self.future.cancelled() and not self._is_answered:
            self.stop()
        elif self._deadline_s is not None and time.monotonic() >= self._deadline_s:
            self.fail(TimeoutError(f"it was not done after deadline_s={self._seconds}."))
        return self._is_answered or self.future.cancelled()

    def finish(self, result: Any) -> None:
        """End it with what it comes to."""
        if self._begin_answer():
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """End it with an error."""
        if self._begin_answer():
            self.stop()
            self.future.set_exception(error)

    def stop(self) -> None:
        """Give up what is being done."""

    def _begin_answer(self) -> bool:
        """Tell whether somebody still waits, who then no longer can cancel it."""
        if self._is_answered or not self.future.set_running_or_notify_cancel():
            return False
        self._is_answered = True
        return True


class Work(Task):
    """A function that calls a model, which waits for its turn before every pass.

    Args:
        model: that it calls.
        function: what is done.
        deadline_s: of a `Task`.
        deltas: of the model, that work meanwhile, as in `Request`.
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
        self._turns = Turns(self._work)
        self._result: Any = None

    def step(self) -> None:
        """Go on up to the next pass, or to the end."""
        try:
            if not self._turns.step():
                self.finish(self._result)
        except Exception as error:
            self.fail(error)

    def stop(self) -> None:
        """Give up what is being done."""
        self._turns.stop()

    def _work(self) -> None:
        handle = self._model.register_forward_pre_hook(lambda *_: self._turns.pause())
        try:
            with choosing_deltas(self._model, self._deltas):
                self._result = self._function()
        finally:
            handle.remove()

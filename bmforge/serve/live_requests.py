"""Access from the event loop to requests that run in the engine's thread."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from starlette.types import Receive

from bmforge.errors import ConfigError
from bmforge.infer.engine.request import Completion, Handle, OutputDelta
from bmforge.serve.errors import RequestError
from bmforge.serve.metrics import TokenTimes

__all__ = ["GoneError", "LiveRequest", "LiveRequests", "unless_gone"]

T = TypeVar("T")
_PING_S = 10


class GoneError(Exception):
    """Raised if the client has disconnected."""


class LiveRequest:
    """A client's running request, as seen from the event loop.

    Args:
        handles: engine handles, one per prompt.
        max_unread_bytes: maximum size of text that is buffered for a slow client; beyond it, the
            request ends.
        prompt_tokens: number of tokens of all prompts.
        times: recorder of token arrival times, if any.
        key: name of the client's API key; "" without keys.

    Attributes:
        is_read: True if the client has received everything.
        ping_s: interval of the pings of a silent stream in seconds; None for the default, -1 for
            none.
        new_tokens: number of tokens generated so far, of all answers.
    """

    def __init__(
        self,
        handles: Sequence[Handle],
        max_unread_bytes: int,
        prompt_tokens: int = 0,
        times: TokenTimes | None = None,
        key: str = "",
    ) -> None:
        self.handles, self.is_read = handles, False
        self.key, self._times = key, times
        self.ping_s: int | None = None
        self.prompt_tokens, self.new_tokens = prompt_tokens, 0
        self._most, self._unread = max_unread_bytes, 0
        self._pieces: deque[tuple[int, OutputDelta]] = deque()
        self._error: RequestError | None = None
        self._came = asyncio.Event()
        self._when_done: Callable[[], object] | None = None
        # Read here, because the engine's thread, which calls `_wake`, has no event loop.
        loop = asyncio.get_running_loop()
        for number, handle in enumerate(handles):
            handle.watch(partial(self._wake, loop, number))

    def _wake(self, loop: asyncio.AbstractEventLoop, number: int) -> None:
        """Notify the event loop of new output; called by the engine's thread."""
        loop.call_soon_threadsafe(self._fetch, number)

    def _fetch(self, number: int) -> None:
        """Move the new output of prompt `number` from the engine's handle into the buffer.

        Only buffered text counts towards `max_unread_bytes`.
        """
        try:
            pieces = self.handles[number].take()
        except Exception as error:
            self._error = self._error or _failed(error)
            pieces = []
        self._pieces += [(number, piece) for piece in pieces]
        if self._times is not None:
            self._times.note(number, pieces, self.handles[number].started_s)
        self.new_tokens += sum(len(piece.ids) for piece in pieces)
        self._unread += sum(_size(piece) for piece in pieces)
        if self._unread > self._most and self._error is None:
            self.cancel()
            self._error = RequestError(
                "the request was stopped, because the client did not read the answer fast "
                "enough. Read the stream continuously.",
                status=408,
            )
        self._came.set()
        self._check_done()

    def when_done(self, call: Callable[[], object]) -> None:
        """Call a function on the event loop once the engine has finished all answers."""
        self._when_done = call
        self._check_done()

    def _check_done(self) -> None:
        if self._when_done is not None and self.done:
            # Cleared before the call, so that the function runs once.
            call, self._when_done = self._when_done, None
            call()

    @property
    def done(self) -> bool:
        """True if the engine has finished all answers."""
        return all(handle.done for handle in self.handles)

    def cancel(self) -> None:
        """End every answer before the engine's next step; the text so far remains readable."""
        for handle in self.handles:
            handle.cancel()

    async def pieces(self) -> AsyncIterator[tuple[int, OutputDelta] | None]:
        """Yield (prompt index, delta) as output arrives, and None periodically in between.

        Raises:
            RequestError: the engine failed, or the client reads too slowly.
        """
        interval = {-1: None, None: _PING_S}.get(self.ping_s, self.ping_s)
        while True:
            while self._pieces:
                number, piece = self._pieces.popleft()
                self._unread -= _size(piece)
                yield number, piece
            if self._error is not None:
                raise self._error
            if self.done:  # the last pieces may not have been notified yet
                for number in range(len(self.handles)):
                    self._fetch(number)
                if not self._pieces and self._error is None:
                    self.is_read = True
                    return
                continue
            # All state was checked without an `await` before this line, so no notification is lost.
            self._came.clear()
            try:
                await asyncio.wait_for(self._came.wait(), interval)
            except TimeoutError:
                yield None

    async def whole(self) -> list[list[Completion]]:
        """Wait until all answers are finished; return the answers of every prompt.

        Raises:
            RequestError: the engine failed.
        """
        async for _ in self.pieces():
            pass
        return self.completions()

    def completions(self) -> list[list[Completion]]:
        """Return the answers of every prompt, all of which must be finished."""
        return [handle.wait(0) for handle in self.handles]


def _size(piece: OutputDelta) -> int:
    return len(piece.text.encode("utf-8", "replace")) + len(piece.ids)


def _failed(error: Exception) -> RequestError:
    if isinstance(error, ConfigError):  # such as a grammar that allows no token
        return RequestError(str(error), code="invalid_value")
    return RequestError(
        f"the engine has failed ({type(error).__name__}). The server's log has the details.",
        status=503,
        code="engine_failed",
    )


class LiveRequests:
    """All running requests of the server, which can be cancelled together."""

    def __init__(self) -> None:
        self._all: set[LiveRequest] = set()
        self._futures: set[Future[Any]] = set()

    def __len__(self) -> int:
        return len(self._all) + len(self._futures)

    def add(self, live: LiveRequest) -> None:
        """Register a running request."""
        self._all.add(live)

    def end(self, live: LiveRequest) -> None:
        """Unregister a request; if it is running, it is cancelled and its memory is released."""
        self._all.discard(live)
        if not live.done:
            live.cancel()

    def cancel_all(self) -> None:
        """End every running answer; text generated so far remains readable."""
        for live in self._all:
            live.cancel()
        for future in self._futures:
            future.cancel()

    @contextmanager
    def ending(self, future: Future[Any]) -> Iterator[None]:
        """Context manager that registers a non-streaming task while it is awaited."""
        self._futures.add(future)
        try:
            yield
        finally:
            self._futures.discard(future)
            future.cancel()


async def unless_gone(receive: Receive, work: Awaitable[T], stop: Callable[[], Any]) -> T:
    """Await `work` and return its result, unless the client disconnects first.

    Starlette keeps running a non-streaming handler after the client has disconnected.

    Args:
        receive: ASGI receive function of a request whose body was read.
        work: awaitable, which is cancelled when the client disconnects.
        stop: function to call as soon as the client disconnects.

    Raises:
        GoneError: the client has disconnected.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_wait_until_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        stop()
        raise GoneError
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

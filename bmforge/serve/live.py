"""Requests of the engine's thread, seen from the event loop."""

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
from bmforge.infer.engine.request import Completion, Handle, Piece
from bmforge.serve.errors import RequestError

__all__ = ["GoneError", "LiveRequest", "LiveRequests", "unless_gone"]

T = TypeVar("T")
_PULSE_S = 10.0


class GoneError(Exception):
    """The client has gone: nobody reads an answer."""


class LiveRequest:
    """What an engine writes for one client's request, as the event loop takes it.

    Args:
        handles: of the engine, one for every prompt.
        max_unread_bytes: generated text buffered for a slow client before the request ends.
        prompt_tokens: tokens of all prompts.

    Attributes:
        is_read: whether the client has taken all of it.
        new_tokens: tokens generated so far, of all answers.
    """

    def __init__(
        self, handles: Sequence[Handle], max_unread_bytes: int, prompt_tokens: int = 0
    ) -> None:
        self.handles, self.is_read = handles, False
        self.prompt_tokens, self.new_tokens = prompt_tokens, 0
        self._most, self._unread = max_unread_bytes, 0
        self._pieces: deque[tuple[int, Piece]] = deque()
        self._error: RequestError | None = None
        self._came = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number, handle in enumerate(handles):
            handle.watch(partial(self._wake, loop, number))

    def _wake(self, loop: asyncio.AbstractEventLoop, number: int) -> None:
        """Have the event loop look; the engine's thread calls this."""
        loop.call_soon_threadsafe(self._fetch, number)

    def _fetch(self, number: int) -> None:
        """Take what the engine has written at once, so that all that is waiting is counted."""
        try:
            found = self.handles[number].take()
        except Exception as error:
            self._error = self._error or _failed(error)
            found = []
        self._pieces += [(number, piece) for piece in found]
        self.new_tokens += sum(len(piece.ids) for piece in found)
        self._unread += sum(_size(piece) for piece in found)
        if self._unread > self._most and self._error is None:
            self.cancel()
            self._error = RequestError("the answer was not read", status=408)
        self._came.set()

    @property
    def done(self) -> bool:
        """Whether the engine has ended with all of it."""
        return all(handle.done for handle in self.handles)

    def cancel(self) -> None:
        """Let every answer end with what is there, before the engine's next step."""
        for handle in self.handles:
            handle.cancel()

    async def pieces(self) -> AsyncIterator[tuple[int, Piece] | None]:
        """Yield (number of the prompt, piece) as they come; None from time to time if none does.

        Raises:
            RequestError: the engine failed, or too much was waiting.
        """
        while True:
            while self._pieces:
                number, piece = self._pieces.popleft()
                self._unread -= _size(piece)
                yield number, piece
            if self._error is not None:
                raise self._error
            if self.done:  # what was put last may not have been told yet
                for number in range(len(self.handles)):
                    self._fetch(number)
                if not self._pieces and self._error is None:
                    self.is_read = True
                    return
                continue
            self._came.clear()
            try:
                await asyncio.wait_for(self._came.wait(), _PULSE_S)
            except TimeoutError:
                yield None

    async def whole(self) -> list[list[Completion]]:
        """Return all answers to every prompt, when they have ended.

        Raises:
            RequestError: the engine failed.
        """
        async for _ in self.pieces():
            pass
        return self.completions()

    def completions(self) -> list[list[Completion]]:
        """Return the answers to every prompt; all have ended."""
        return [handle.wait(0) for handle in self.handles]


def _size(piece: Piece) -> int:
    return len(piece.text.encode("utf-8", "replace")) + len(piece.ids)


def _failed(error: Exception) -> RequestError:
    if isinstance(error, ConfigError):  # such as a rule that leaves no token
        return RequestError(str(error), code="invalid_value")
    return RequestError(
        f"the engine cannot go on ({type(error).__name__})", status=503, code="engine_failed"
    )


class LiveRequests:
    """All requests that run, so that they can be ended together."""

    def __init__(self) -> None:
        self._all: set[LiveRequest] = set()
        self._futures: set[Future[Any]] = set()

    def __len__(self) -> int:
        return len(self._all) + len(self._futures)

    def add(self, live: LiveRequest) -> None:
        """Remember a request."""
        self._all.add(live)

    def end(self, live: LiveRequest) -> None:
        """Forget a request; if it still runs it is cancelled, and gives its memory back."""
        self._all.discard(live)
        if not live.done:
            live.cancel()

    def cancel_all(self) -> None:
        """Let every answer end with what is there."""
        for live in self._all:
            live.cancel()
        for future in self._futures:
            future.cancel()

    @contextmanager
    def ending(self, future: Future[Any]) -> Iterator[None]:
        """Remember what is done whole for as long as somebody waits for it."""
        self._futures.add(future)
        try:
            yield
        finally:
            self._futures.discard(future)
            future.cancel()


async def unless_gone(receive: Receive, work: Awaitable[T], stop: Callable[[], Any]) -> T:
    """Return the result of `work`, unless the client goes before.

    Starlette lets a handler that streams nothing run on when nobody waits for its answer.

    Args:
        receive: of a request whose body was read.
        work: what is waited for; it is cancelled when the client goes.
        stop: called as soon as the client goes.

    Raises:
        GoneError: the client has gone.
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

"""Requests with size-limited, strictly parsed JSON bodies, and event-stream responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from bmforge.serve.errors import RequestError, explain_types, overload_error
from bmforge.serve.serving import client_of, serving_of
from bmforge.serve.settings import BodyLimits
from bmforge.serve.strict_json import parse_json

__all__ = ["GONE", "EventStream", "StrictRequest", "StrictRoute"]

_LARGE = 1 << 16
_WAITING = 0.9  # fraction of the time limit for receiving a request that its body may wait
GONE = 499  # nginx's status for a client that has disconnected


class StrictRequest(Request):
    """HTTP request with a limited body size, parsed by `parse_json`.

    A large body is received, parsed and validated within the server's `BodyBudget`.

    Args:
        scope: ASGI scope.
        receive: ASGI receive function.
        field: FastAPI's `ModelField` that validates the body; None if the body has no type.
    """

    _reserved = 0

    def __init__(self, scope: Scope, receive: Receive, field: Any = None) -> None:
        super().__init__(scope, receive)
        self._field = field

    async def body(self) -> bytes:
        """Read the request body.

        Raises:
            RequestError: the Content-Length or the actual size exceeds the limit (status 413), or
                the memory budget had no space for a large body for most of the time that the
                client has to send it (status 503).
        """
        if not hasattr(self, "_body"):
            serving = serving_of(self)
            most = serving.config.body.max_body_bytes
            too_large = RequestError(
                f"the body has more than {most} bytes. Send a smaller request.", status=413
            )
            expected = int(self.headers.get("content-length", most))  # unknown for chunked bodies
            if expected > most:
                raise too_large
            if expected > _LARGE:
                await self._reserve(expected)
            body = bytearray()
            async for chunk in self.stream():
                body += chunk
                if len(body) > most:
                    raise too_large
            self._body = bytes(body)
        return self._body

    async def _reserve(self, size: int) -> None:
        """Wait until the budget has space for a large body."""
        serving = serving_of(self)
        wait_s = _WAITING * serving.config.timeouts.receive_s
        try:
            async with asyncio.timeout(wait_s):
                await serving.bodies.reserve(client_of(self), size)
        except TimeoutError:
            raise overload_error(
                "the server is receiving other large requests. Retry later.", wait_s
            ) from None
        self._reserved = size

    async def json(self) -> Any:
        """Parse the request body; a large one is parsed and validated in a thread.

        FastAPI validates bodies on the event loop, which takes 18 ms for 3,000 messages. It accepts
        an instance of the body's type without validation.
        """
        if not hasattr(self, "_json"):
            body, serving = await self.body(), serving_of(self)
            if len(body) > _LARGE:
                read = partial(_parse_and_validate, body, serving.config.body, self._field)
                self._json = await serving.parse(read)
            else:
                self._json = parse_json(body, serving.config.body)
            self.release()
        return self._json

    def release(self) -> None:
        """Release the memory that was reserved for the body."""
        if self._reserved:
            serving_of(self).bodies.release(client_of(self), self._reserved)
            self._reserved = 0


def _parse_and_validate(body: bytes, limits: BodyLimits, field: Any) -> Any:
    """Parse a body and, if it has a type, convert it to an instance of its type.

    Raises:
        RequestError: the body is not valid JSON, or does not match the type.
    """
    value = parse_json(body, limits)
    if field is None:
        return value
    instance, errors = field.validate(value, {}, loc=("body",))
    if errors:
        raise explain_types(RequestValidationError(errors))
    return instance


class StrictRoute(APIRoute):
    """A route with strict JSON parsing."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        """Return a handler that passes requests as `StrictRequest`."""
        handler = super().get_route_handler()
        field = None if self._embed_body_fields else self.body_field

        async def handle(request: Request) -> Response:
            strict = StrictRequest(request.scope, request.receive, field)
            try:
                return await handler(strict)
            finally:
                strict.release()

        return handle


class EventStream(StreamingResponse):
    """Response of server-sent events, with a callback at the end.

    Args:
        events: encoded events.
        on_end: function to call at the end, even if nothing was sent.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], on_end: Callable[[], None]) -> None:
        super().__init__(events, headers={"x-accel-buffering": "no"})
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, then call `on_end`."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()

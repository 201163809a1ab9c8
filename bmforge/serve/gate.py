"""What stands in front of every request: who it is from, what is said of every answer, the log."""

from __future__ import annotations

import time
import traceback

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bmforge.logging import get_logger
from bmforge.serve.auth import check_origin
from bmforge.serve.errors import RequestError, error_response
from bmforge.serve.serving import Serving

__all__ = ["Gate"]

# They tell nothing but that the server is there, and are asked by machines without keys.
_OPEN = ("/health", "/ready")
_HEADERS = {
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Gate:
    """Lets requests through to an app, as an ASGI middleware.

    Args:
        app: what is behind.
        serving: whose keys and limits hold.
    """

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self._app, self._serving = app, serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; what is refused is not read."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, seen = time.monotonic(), _Seen(send)
        try:
            self._check(scope)
            await self._app(scope, receive, seen)
        except RequestError as error:
            await error_response(error)(scope, receive, seen)
        except Exception as error:
            _log_failure(error)
            if seen.status:  # nothing more can be said; the connection ends in the middle
                raise
            failed = RequestError("the server failed; its log says more", status=500)
            await error_response(failed)(scope, receive, seen)
        finally:
            self._note(scope, seen.status, time.monotonic() - begin)

    def _check(self, scope: Scope) -> None:
        headers, keys = Headers(scope=scope), self._serving.keys
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy in front may have read another body than this server (RFC 9112, 6.1).
            raise RequestError(
                "content-length and transfer-encoding contradict each other",
                headers={"connection": "close"},
            )
        state = scope.setdefault("state", {})
        check_origin(self._serving.config, bool(keys), scope["method"], headers)
        if keys and scope["path"] not in _OPEN:
            state["key"] = keys.find(headers.get("authorization"))

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        """Count a request, and log it: never what was said in it, nor what stood behind ``?``."""
        route = scope.get("route")
        path = getattr(route, "path", "other")  # not what was asked for, which may be anything
        self._serving.metrics.note_request(path, status, seconds)
        if self._serving.config.log_requests:
            get_logger().info("%s %s %s %.3f s", scope["method"], path, status or "left", seconds)


class _Seen:
    """Sends an answer with the headers of every answer, and remembers its status."""

    def __init__(self, send: Send) -> None:
        self._send, self.status = send, 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
        await self._send(message)


def _log_failure(error: Exception) -> None:
    """Say where the server failed, not with which words: they may be a person's."""
    places = "".join(traceback.format_tb(error.__traceback__))
    get_logger().error("%s in\n%s", type(error).__name__, places.rstrip())

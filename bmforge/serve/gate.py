"""Middleware of all requests: authentication, response headers, request log."""

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

# They reveal only that the server runs, and are requested by health checks without keys.
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
    """ASGI middleware that authenticates, adds headers, counts and logs requests.

    Args:
        app: wrapped application.
        serving: server state with keys and limits.
    """

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self._app, self._serving = app, serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; the body of a rejected request is not read."""
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
            if seen.status:  # the response has begun; the connection is aborted
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
        """Count and log a request, without its contents and query string."""
        route = scope.get("route")
        path = getattr(route, "path", "other")  # not the requested path, which is arbitrary
        self._serving.metrics.note_request(path, status, seconds)
        if self._serving.config.log_requests:
            get_logger().info("%s %s %s %.3f s", scope["method"], path, status or "left", seconds)


class _Seen:
    """Sends a response with the common headers, and records its status."""

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
    """Log where the server failed, without the error's text, which may be private."""
    places = "".join(traceback.format_tb(error.__traceback__))
    get_logger().error("%s in\n%s", type(error).__name__, places.rstrip())

"""Middleware for all requests: authentication, response headers, and request log."""

from __future__ import annotations

import re
import secrets
import time
import traceback

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bmforge.logging import get_logger
from bmforge.serve.auth import check_origin, is_allowed_origin
from bmforge.serve.errors import RequestError, error_response
from bmforge.serve.serving import Serving
from bmforge.serve.settings import MAX_HEAD_BYTES

__all__ = ["Gate"]

# Paths that health checks request without keys; they only reveal that the server runs.
_OPEN = ("/health", "/ready")
# Paths that need the admin key; ordinary keys are rejected.
_ADMIN = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_HEADERS = {
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_PREFLIGHT = {
    "access-control-allow-methods": "GET, HEAD, POST, OPTIONS",
    "access-control-allow-headers": "authorization, content-type, x-api-key, x-request-id",
    "access-control-max-age": "600",
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
        """Handle one request; the body of a rejected request is not read."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, config = Headers(scope=scope), self._serving.config
        if config.root_path:  # ASGI requires the prefix, but some proxies strip it
            bare = scope["path"].removeprefix(config.root_path)
            root = {"root_path": config.root_path, "path": config.root_path + bare}
            scope = {**scope, **root}
        begin, seen = time.monotonic(), _ResponseSender(send, _request_id(headers))
        origin = headers.get("origin")
        if is_allowed_origin(config, origin):
            seen.allow(str(origin))
        try:
            if seen.is_allowed and _is_preflight(scope, headers):
                await Response(status_code=204, headers=_PREFLIGHT)(scope, receive, seen)
                return
            self._check(scope)
            await self._app(scope, receive, seen)
        except RequestError as error:
            await error_response(error, scope)(scope, receive, seen)
        except Exception as error:
            _log_failure(error)
            if seen.status:  # the response has begun; the connection is aborted
                raise
            failed = RequestError(
                (
                    "the request failed because of an error of the server. The log of the server "
                    "has the details."
                ),
                status=500,
            )
            await error_response(failed, scope)(scope, receive, seen)
        finally:
            self._note(scope, seen, time.monotonic() - begin)

    def _check(self, scope: Scope) -> None:
        headers, keys = Headers(scope=scope), self._serving.keys
        version = scope["http_version"]
        if not version.startswith("1."):  # such as the preface of HTTP/2, which h11 reads as 1.1
            raise RequestError(
                f"HTTP/{version} is not supported (supported: HTTP/1.0 and HTTP/1.1). Use "
                "HTTP/1.1.",
                status=505,
                headers={"connection": "close"},
            )
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy may have read another body than this server would (RFC 9112, 6.1).
            raise RequestError(
                "content-length and transfer-encoding cannot be used together. Send only "
                "one of them.",
                headers={"connection": "close"},
            )
        if version == "1.0" and "transfer-encoding" in headers:
            raise RequestError(
                "transfer-encoding cannot be used in HTTP/1.0. Send content-length, or use "
                "HTTP/1.1.",
                headers={"connection": "close"},
            )
        size = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if size + len(scope.get("raw_path") or b"") + len(scope["query_string"]) > MAX_HEAD_BYTES:
            raise RequestError(
                f"the request line and headers have more than {MAX_HEAD_BYTES} bytes. Send "
                "fewer or shorter headers.",
                status=431,
                headers={"connection": "close"},
            )
        state = scope.setdefault("state", {})
        check_origin(self._serving.config, bool(keys), scope["method"], headers)
        path = scope["path"].removeprefix(self._serving.config.root_path)
        if path in _ADMIN:
            self._check_admin(headers)
        elif keys and path not in _OPEN:
            state["key"] = keys.find(_authorization(headers))

    def _check_admin(self, headers: Headers) -> None:
        """Check the admin key of a request that loads or removes an adapter."""
        if not self._serving.config.access.allow_runtime_lora_updating:
            raise RequestError(
                (
                    "this server does not load adapters at run time. Ask the operator to start "
                    "the server with --allow-runtime-lora-updating."
                ),
                status=403,
            )
        self._serving.admin.find(_authorization(headers))

    def _note(self, scope: Scope, seen: _ResponseSender, seconds: float) -> None:
        """Count a finished request, and log it without its content and query string."""
        status = seen.status
        route = scope.get("route")
        path = getattr(route, "path", "other")  # not the requested path, which is arbitrary text
        self._serving.metrics.note_request(path, status, seconds)
        if self._serving.config.log_requests:
            get_logger().info(
                "%s %s %s %.3f s %s", scope["method"], path, status or "left", seconds, seen.id
            )


def _request_id(headers: Headers) -> str:
    """Return the client's request id if it matches `_REQUEST_ID`; otherwise a new id."""
    client_id = headers.get("x-request-id", "")
    return client_id if _REQUEST_ID.fullmatch(client_id) else f"req-{secrets.token_hex(12)}"


def _authorization(headers: Headers) -> str | None:
    """Return the Authorization header, or Anthropic's ``x-api-key`` in the same format."""
    key = headers.get("x-api-key")
    return headers.get("authorization", None if key is None else f"Bearer {key}")


def _is_preflight(scope: Scope, headers: Headers) -> bool:
    return scope["method"] == "OPTIONS" and "access-control-request-method" in headers


class _ResponseSender:
    """ASGI send function that adds the common headers, and records the response's status."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send, self.status, self.id = send, 0, request_id
        self._headers = {**_HEADERS, "x-request-id": request_id}
        self.is_allowed = False

    def allow(self, origin: str) -> None:
        """Allow pages of another origin to read the response."""
        self.is_allowed = True
        self._headers |= {
            "access-control-allow-origin": origin,
            "access-control-expose-headers": "retry-after, x-request-id",
            "cross-origin-resource-policy": "cross-origin",
            "vary": "origin",
        }

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            for name, value in self._headers.items():
                headers.setdefault(name, value)
        await self._send(message)


def _log_failure(error: Exception) -> None:
    """Log the type and location of an internal error, but not its message, which may be private."""
    places = "".join(traceback.format_tb(error.__traceback__))
    get_logger().error("%s in\n%s", type(error).__name__, places.rstrip())

"""Builds the server's OpenAPI schema, with its actual responses and errors."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from bmforge import __version__

__all__ = ["describe_api"]

_ERRORS = {
    400: "A field is missing, unknown, out of range, or has no effect.",
    401: "An API key is required, or the key is unknown.",
    403: "The request comes from a web page of another site, or uses another host name.",
    404: "The model or path does not exist.",
    408: "The request was not complete in time, or the client did not read the response.",
    413: "The body is too large.",
    429: "Too many requests from this client; see Retry-After.",
    431: "The head is too large.",
    500: "The server failed.",
    503: "The server is overloaded, stopping, or its engine has failed; see Retry-After.",
}
_OPEN = ("/health", "/ready")
_ADMIN = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "type": {"const": "error", "description": "of /v1/messages alone"},
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        },
    },
}


def describe_api(app: FastAPI, has_keys: bool, root_path: str = "") -> dict[str, Any]:
    """Return the OpenAPI schema of an application.

    Args:
        app: result of `create_app`.
        has_keys: True if requests need a key.
        root_path: prefix of all paths.
    """
    servers = [{"url": root_path}] if root_path else None
    schema = get_openapi(title="bmforge", version=__version__, routes=app.routes, servers=servers)
    components = schema.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["Error"] = _ERROR
    components["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "basic": {"type": "http", "scheme": "basic", "description": "the key as password"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            _describe(path, operation)
            if path in _ADMIN or (has_keys and path not in _OPEN):
                operation["security"] = [{name: []} for name in components["securitySchemes"]]
    return schema


def _describe(path: str, operation: dict[str, Any]) -> None:
    """Replace the response descriptions of one operation with the server's actual responses."""
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if path in _STREAMED:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    if path == "/metrics" or path in _ADMIN:
        content = {"text/plain": {"schema": {"type": "string"}}}
    responses: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    for status, description in _ERRORS.items():
        if path in _OPEN and status == 503:
            responses["503"] = {
                "description": "The server has failed, or is not ready.",
                "content": content,
            }
        else:
            responses[str(status)] = {"description": description, "content": error}
    operation["responses"] = responses

"""Error responses in OpenAI's format."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import Scope

__all__ = [
    "RequestError",
    "anthropic_error",
    "error_body",
    "error_response",
    "explain_types",
    "overload_error",
    "renaming_fields",
]

# HTTP status -> OpenAI's error type.
_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
# HTTP status -> Anthropic's error type, if it differs from OpenAI's.
_ANTHROPIC_KINDS = {404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}
# After this error, Anthropic's client sends the whole conversation instead of a `thread`.
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": []}

_SHOWN_CHARS = 40  # of a tool's type, in an error message


class RequestError(HTTPException):
    """Error that rejects a request, with an HTTP status.

    Args:
        message: description with the value and the allowed values.
        param: name of the field.
        status: HTTP status.
        code: OpenAI's error code.
        headers: response headers.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        status: int = 400,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.message, self.param, self.code = message, param, code


@contextmanager
def renaming_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Context manager in which errors of a converted request name the fields that the client sent.

    Requests of other protocols are converted to chat requests before validation.

    Args:
        names: dict from field of the chat request to field of the client's request. An error in
            one message names only the field of the whole conversation, because the conversion
            changes the indices of the messages.
    """
    try:
        yield
    except RequestError as error:
        field = error.param or ""
        if field.startswith("messages."):
            name = names.get("messages", "messages")
            error.message = error.message.replace("image_url.url", "the image", 1)
        else:
            name = names.get(field, field)
        error.message = error.message.replace(field, name, 1)
        error.param = name or None
        raise


def overload_error(message: str, retry_after_s: float, status: int = 503) -> RequestError:
    """Return the error for a request that the client may retry later."""
    headers = {"retry-after": str(max(1, math.ceil(retry_after_s)))}
    code = "rate_limit_exceeded" if status == 429 else "overloaded"
    return RequestError(message, status=status, code=code, headers=headers)


def error_body(error: RequestError) -> dict[str, Any]:
    """Return the body of an error response."""
    status = error.status_code
    kind = _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {
        "error": {
            "message": error.message,
            "type": kind,
            "param": error.param,
            "code": error.code,
        }
    }


def error_response(error: RequestError, scope: Scope) -> JSONResponse:
    """Return the HTTP response for an error; paths below /v1/messages use Anthropic's format."""
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    is_anthropic = path.startswith("/v1/messages")
    body = anthropic_error(error) if is_anthropic else error_body(error)
    return JSONResponse(body, error.status_code, error.headers)


def anthropic_error(error: RequestError) -> dict[str, Any]:
    """Return the body of an error response in Anthropic's format, with OpenAI's fields added."""
    body, status = error_body(error), error.status_code
    kind = "api_error" if status >= 500 else body["error"]["type"]
    body["error"]["type"] = _ANTHROPIC_KINDS.get(status, kind)
    if error.param == "thread":
        body["error"]["details"] = _NO_THREADS
    return {"type": "error", **body}


def explain_types(error: RequestValidationError) -> RequestError:
    """Describe the first invalid field of a request.

    Only numbers and the types of tools are repeated in the message; texts may be private.
    """
    problems = _tagged_problems(error.errors()) or error.errors()
    first = problems[0]
    path = [str(part) for part in _without_unions(first["loc"])]
    if first["type"] in ("unknown_field", "neutral_field"):
        return _explain_field(first["ctx"], path)
    if not path and first["type"] == "value_error":
        return RequestError(_message(first), code="invalid_value")
    if not path:
        return RequestError(
            "the body must be a JSON object, with the header Content-Type: application/json."
        )
    where, name = ".".join(path), path[0]
    if first["type"] == "literal_error" and name == "tools" and path[-1] == "type":
        return _explain_tool_type(first, where)
    if (part_error := _explain_part(problems)) is not None:
        return part_error
    if any(
        problem["type"] == "literal_error"
        and problem["loc"][-1] == "type"
        and "content" in problem["loc"]
        for problem in problems
    ):
        type_problem = next(p for p in problems if p["loc"][-1] == "type")
        number = next((str(part) for part in type_problem["loc"] if isinstance(part, int)), "0")
        return RequestError(
            (
                f"messages.{number}.content has a part that is not text, but this model "
                "supports only text. Leave this part out."
            ),
            f"messages.{number}.content",
            code="unsupported_value",
        )
    if first["type"] in ("extra_forbidden", "none_required"):
        return RequestError(
            f"{where} is not supported. Leave it out.", where, code="unknown_parameter"
        )
    if first["type"] == "missing":
        return RequestError(f"{where} is missing.", where, code="missing_required_parameter")
    # For a field that accepts several types, list the requirements of each type.
    messages = [
        _message(problem).removesuffix(".")
        for problem in problems
        if problem["loc"][1:2] == first["loc"][1:2]
    ]
    needed = ", or: ".join(dict.fromkeys(messages[:4]))
    field, value = where if len(messages) == 1 else name, first.get("input")
    if len(messages) == 1 and isinstance(value, (int, float)):
        field = f"{where}={json.dumps(value)}"
    return RequestError(f"{field}: {needed}.", name, code="invalid_value")


def _explain_field(context: Mapping[str, Any], path: Sequence[str]) -> RequestError:
    """Describe an unknown field, or a field that is accepted only with other values."""
    where = ".".join([*path, context["field"]])
    if "hint" in context:
        message = f"{where} is not supported.{context['hint']}"
        return RequestError(message, where, code="unknown_parameter")
    message = f"{where} must be {context['allowed']}, because {context['reason']}."
    return RequestError(message, where, code="unsupported_value")


def _explain_tool_type(problem: Mapping[str, Any], where: str) -> RequestError:
    """Describe a tool of an unsupported type, such as OpenAI's `web_search`."""
    value = str(problem["input"])[:_SHOWN_CHARS]
    supported = problem["ctx"]["expected"].replace("'", "")
    return RequestError(
        f"{where}={value!r} is not supported (supported: {supported}).",
        where,
        code="unsupported_value",
    )


def _tagged_problems(problems: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the problems of an object whose `type` selects one of several classes.

    The problems of the other classes, and pydantic's labels in the paths, are left out.
    """
    tagged: list[dict[str, Any]] = []
    for problem in problems:
        loc = list(problem["loc"])
        label = next((n for n, p in enumerate(loc) if str(p).startswith("tagged-union[")), None)
        if label is None or problem["type"] == "model_attributes_type":  # not an object
            continue
        path, kind, message = [*loc[:label], *loc[label + 2 :]], problem["type"], problem["msg"]
        if kind == "union_tag_not_found":
            path, kind = [*path, "type"], "missing"
        elif kind == "union_tag_invalid":
            path, kind = [*path, "type"], "literal_error"
            message = f"Input should be one of {problem['ctx']['expected_tags']}"
        tagged.append({**problem, "loc": path, "type": kind, "msg": message})
    return tagged


def _explain_part(problems: Sequence[Mapping[str, Any]]) -> RequestError | None:
    """Describe the first invalid part of a message's content; None if there is none."""
    for problem in problems:
        path = _without_unions(problem["loc"])
        labels = [n for n, part in enumerate(path) if str(part).startswith("list[tagged-union")]
        if not labels or path[labels[0] - 1] != "content":
            continue
        content = ".".join(map(str, path[: labels[0]]))
        index, names = path[labels[0] + 1 : labels[0] + 2], path[labels[0] + 3 :]
        where, kind = ".".join(map(str, [content, *index, *names])), problem["type"]
        if kind == "union_tag_invalid":
            return RequestError(
                f"{content} has a part of an unsupported type (supported: "
                f"{problem['ctx']['expected_tags']}).",
                content,
                code="unsupported_value",
            )
        if kind == "unknown_field":
            where = f"{where}.{problem['ctx']['field']}"
            hint = problem["ctx"]["hint"]
            return RequestError(f"{where} is not supported.{hint}", where, code="unknown_parameter")
        message = "Field required" if kind == "missing" else _message(problem).removesuffix(".")
        return RequestError(f"{where}: {message}.", where, code="invalid_value")
    return None


def _without_unions(loc: Sequence[Any]) -> list[Any]:
    """Return a path in the body without pydantic's labels for unions and their classes."""
    labels = (
        str(part).startswith(("list[union", "literal[")) or str(part)[:1].isupper() for part in loc
    )
    return [p for p, label in zip(loc, labels, strict=True) if not label and p != "body"]


def _message(problem: Mapping[str, Any]) -> str:
    return str(problem["msg"]).removeprefix("Value error, ")

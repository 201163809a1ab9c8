"""Tool calls: functions that a model may or must call.

A required call is constrained to JSON. An optional one is detected in the answer, as
``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (format of Qwen and Hermes).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from bmforge.infer.engine.constraint import Constraint
from bmforge.serve.errors import RequestError
from bmforge.serve.openai_types import ChatRequest, ToolChoice

__all__ = ["LITERAL_KEYWORDS", "Call", "CallReader", "ToolUse", "find_tools", "read_call"]

# Keywords of JSON schemas whose values are data: a "$ref" inside is text.
LITERAL_KEYWORDS = frozenset(("const", "enum", "default", "examples"))
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Call:
    """A tool call.

    Args:
        name: name of the function.
        arguments: arguments as JSON.
    """

    name: str
    arguments: str

    def as_json(self, index: int | None = None) -> dict[str, Any]:
        """Return the call with a new id; in a stream with its index."""
        position: dict[str, Any] = {} if index is None else {"index": index}
        function = {"name": self.name, "arguments": self.arguments}
        return {
            **position,
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": function,
        }


@dataclass(frozen=True)
class ToolUse:
    """Use of tools in a request.

    Args:
        shown: tools passed to the template; None without tools.
        names: functions that may be called.
        rule: constraint on the answer if a call is required.
        begin: beginning of the answer if a call is required.
        max_calls: maximum number of calls in one answer; None is unlimited.
    """

    shown: list[dict[str, Any]] | None = None
    names: frozenset[str] = frozenset()
    rule: Constraint | None = None
    begin: str = ""
    max_calls: int | None = None


def find_tools(body: ChatRequest, writes_calls: bool) -> ToolUse:
    """Return how a request uses tools.

    Args:
        body: request body.
        writes_calls: the model's template uses the detectable call format.

    Raises:
        RequestError: optional calls in an unsupported format, or conflicting constraints.
    """
    if not body.tools or body.tool_choice == "none":
        return ToolUse()
    shown = [tool.model_dump(exclude_none=True) for tool in body.tools]
    functions = {tool.function.name: tool.function.parameters for tool in body.tools}
    if len(functions) != len(body.tools):
        raise RequestError("tools has a name twice", "tools", code="invalid_value")
    if body.response_format is not None and body.response_format.type != "text":
        raise RequestError(
            "tools and response_format contradict each other; leave one out", "response_format"
        )
    if body.structured_outputs is not None:
        raise RequestError(
            "tools and structured_outputs contradict each other; leave one out",
            "structured_outputs",
        )
    names = frozenset(functions)
    if body.tool_choice in (None, "auto"):
        if not writes_calls:
            raise RequestError(
                "this model's chat template has no form for calls; tool_choice required, or the "
                "name of a function, works with every model",
                "tool_choice",
                code="unsupported_value",
            )
        most = 1 if body.parallel_tool_calls is False else None
        return ToolUse(shown, names, max_calls=most)
    if isinstance(body.tool_choice, ToolChoice):
        name = body.tool_choice.function.name
        if name not in functions:
            raise RequestError(f"tool_choice names {name!r}, which is no tool", "tool_choice")
        functions = {name: functions[name]}
    begin = f"{_OPEN}\n" if writes_calls else ""
    return ToolUse(shown if writes_calls else None, names, _call_rule(functions), begin)


def _call_rule(functions: dict[str, dict[str, Any] | None]) -> Constraint:
    """Return the constraint that an answer is a call of one of the functions.

    Every function's schema becomes a definition; references to its root are redirected to it.
    """
    definitions, calls = {}, []
    for number, (name, schema) in enumerate(functions.items()):
        key = f"tool{number}"
        definitions[key] = _move(schema or {"type": "object"}, f"#/$defs/{key}")
        properties = {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{key}"}}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            }
        )
    return Constraint.json_schema({"$defs": definitions, "anyOf": calls})


def _move(schema: Any, root: str) -> Any:
    if isinstance(schema, list):
        return [_move(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {
        key: value if key in LITERAL_KEYWORDS else _move(value, root)
        for key, value in schema.items()
    }
    target = moved.get("$ref")
    # "#/..." counts from the root, which moves; "#name" is an anchor, which is found anywhere.
    if isinstance(target, str) and (target == "#" or target.startswith("#/")):
        moved["$ref"] = root + target[1:]
    return moved


def read_call(text: str, names: Collection[str]) -> Call | None:
    """Parse a text as a call; None if it is none."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str) or name not in names:
        return None
    arguments = call.get("arguments", {})
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return Call(name, arguments) if isinstance(arguments, str) else None


class CallReader:
    """Separates calls from text in a stream.

    Args:
        names: functions; a call of another one is text.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names, self._held = names, ""

    def feed(self, text: str) -> Iterator[str | Call]:
        """Yield text and calls that are complete after the next piece of text."""
        self._held += text
        while True:
            before, opened, tail = self._held.partition(_OPEN)
            if not opened:
                size = _begun(self._held)
                ready, self._held = (
                    self._held[: len(self._held) - size],
                    self._held[-size:] if size else "",
                )
                if ready:
                    yield ready
                return
            if before:
                yield before
            inner, closed, behind = tail.partition(_CLOSE)
            if not closed:
                self._held = opened + tail
                return
            yield read_call(inner, self._names) or opened + inner + closed
            self._held = behind.removeprefix("\n")

    def end(self) -> str:
        """Return the buffered rest, which is text."""
        buffered, self._held = self._held, ""
        return buffered


def _begun(text: str) -> int:
    """Return how many characters at the end of a text may begin a call."""
    return next((size for size in range(len(_OPEN) - 1, 0, -1) if text.endswith(_OPEN[:size])), 0)

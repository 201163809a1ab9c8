"""Tool calls: functions that a model may or must call.

A required call is constrained to JSON. An optional one is detected in the answer, in the format of
the model's chat template (`tool_formats.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bmforge.infer.engine.constraint import Constraint
from bmforge.serve.errors import RequestError
from bmforge.serve.message_types import AllowedChoice, Tool
from bmforge.serve.openai_types import ChatRequest
from bmforge.serve.tool_formats import ToolFormat

__all__ = ["LITERAL_KEYWORDS", "ToolUse", "call_starts", "find_tools"]

# Keywords of JSON schemas whose values are data, in which a "$ref" is plain text.
LITERAL_KEYWORDS = frozenset(("const", "enum", "default", "examples"))


@dataclass(frozen=True)
class ToolUse:
    """Tools of one request, and how calls are recognized (format) or forced (constraint).

    Args:
        shown: tools passed to the template; None without tools.
        schemas: dict from the name of each function that may be called to its schema.
        form: format of optional calls; None if optional calls are not allowed.
        rule: constraint on the answer if a call is required.
        begin: beginning of the answer if a call is required.
        max_calls: maximum number of calls in an answer; None for no limit.
    """

    shown: list[dict[str, Any]] | None = None
    schemas: Mapping[str, dict[str, Any] | None] = field(default_factory=dict)
    form: ToolFormat | None = None
    rule: Constraint | None = None
    begin: str = ""
    max_calls: int | None = None


def find_tools(body: ChatRequest, form: ToolFormat | None) -> ToolUse:
    """Return the tool use of a request.

    Args:
        body: request body.
        form: tool-call format of the model's template; None if the template has no format.

    Raises:
        RequestError: the format of optional calls is not supported, or constraints conflict.
    """
    if not body.tools or body.tool_mode == "none":
        return ToolUse()
    if len({tool.function.name for tool in body.tools}) != len(body.tools):
        raise RequestError(
            "tools contains two functions with the same name. Rename one of them.",
            "tools",
            code="invalid_value",
        )
    if body.outputs is not None and body.tool_mode == "required":
        raise RequestError(
            'structured_outputs cannot be used together with tool_choice="required" or a named '
            "function. Keep one of them.",
            "structured_outputs",
        )
    callable_tools = _callable_tools(body, body.tools)
    functions = {tool.function.name: tool.function.parameters for tool in callable_tools}
    # The prompt has no tool that may not be called, except for those beside a named function.
    in_prompt = callable_tools if isinstance(body.tool_choice, AllowedChoice) else body.tools
    shown = [tool.model_dump(exclude_none=True) for tool in in_prompt]
    if body.tool_mode == "auto":
        if form is None:
            raise RequestError(
                (
                    "the chat template of this model does not support tool calls. Use "
                    'tool_choice="required" or a named function, which every model supports.'
                ),
                "tool_choice",
                code="unsupported_value",
            )
        most = 1 if body.parallel_tool_calls is False else None
        return ToolUse(shown, functions, form, max_calls=most)
    begin = f"{form.open[0]}\n" if form is not None and form.is_json else ""
    return ToolUse(None if form is None else shown, functions, None, _call_rule(functions), begin)


def call_starts(tools: ToolUse, tokenizer: Any) -> tuple[str | int, ...]:
    """Return the texts and token ids with which an optional tool call begins."""
    if tools.form is None:
        return ()
    marks = [mark for mark in tools.form.open if mark]
    ids = [row[0] for mark in marks if len(row := tokenizer.encode_chat(mark)) == 1]
    is_bare = "" in tools.form.open
    bare = [f'{{"name": {json.dumps(name)}' for name in tools.schemas] if is_bare else []
    return (*marks, *ids, *bare)


def _callable_tools(body: ChatRequest, tools: list[Tool]) -> list[Tool]:
    """Return the tools that `tool_choice` allows.

    Raises:
        RequestError: `tool_choice` names a function that is not one of the tools.
    """
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        return tools
    allowed = choice.allowed_tools.tools if isinstance(choice, AllowedChoice) else [choice]
    names = {tool.function.name for tool in allowed}
    if unknown := names - {tool.function.name for tool in tools}:
        raise RequestError(
            f"tool_choice names the function {min(unknown)!r}, which is not in tools. Add it to "
            "tools.",
            "tool_choice",
        )
    return [tool for tool in tools if tool.function.name in names]


def _call_rule(functions: Mapping[str, dict[str, Any] | None]) -> Constraint:
    """Return the constraint under which an answer must call one of the functions.

    Every function's schema becomes an entry of ``$defs``; a ``$ref`` to the root of the schema is
    changed to refer to this entry.
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
    # "#/..." is relative to the root, which moves; "#name" is an anchor, which is found anywhere.
    if isinstance(target, str) and (target == "#" or target.startswith("#/")):
        moved["$ref"] = root + target[1:]
    return moved

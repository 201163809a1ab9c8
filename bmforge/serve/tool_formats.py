"""Table of the formats in which models write tool calls, with a parser for each.

A model's format is detected from its chat template. The names are those of vLLM's
``--tool-call-parser``.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bmforge.serve.parts import GeneratedToolCall

__all__ = ["FORMATS", "Schemas", "ToolFormat", "find_format", "read_json_call"]

Schemas = Mapping[str, Mapping[str, Any] | None]
Parse = Callable[[str, Schemas], list[GeneratedToolCall] | None]


@dataclass(frozen=True)
class ToolFormat:
    """Format in which a model writes tool calls.

    Args:
        name: name in `--tool-call-parser`.
        marks: strings that a chat template of this format contains.
        open: delimiters before calls; "" if an answer that begins with ``{`` is a call.
        close: delimiter after calls; empty if the answer ends with the calls.
        parse: function (text between the delimiters, schemas of the functions) that returns the
            calls; None if the text is not a call.
        is_json: True if the text is a single JSON object, whose arguments can be streamed.
    """

    name: str
    marks: tuple[str, ...]
    open: tuple[str, ...]
    close: str
    parse: Parse
    is_json: bool = False


def read_json_call(value: Any, schemas: Schemas) -> GeneratedToolCall | None:
    """Parse a JSON value as a tool call; return None if it is not a call.

    Args:
        value: object with ``name`` and ``arguments``, or Llama's ``parameters``.
        schemas: schemas of the functions that may be called.
    """
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or name not in schemas:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return GeneratedToolCall(name, arguments) if isinstance(arguments, str) else None


def _load(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _calls_of(values: list[Any], schemas: Schemas) -> list[GeneratedToolCall] | None:
    calls = [read_json_call(value, schemas) for value in values]
    return [call for call in calls if call is not None] if calls and all(calls) else None


def _parse_json(text: str, schemas: Schemas) -> list[GeneratedToolCall] | None:
    return _calls_of([_load(text)], schemas)


def _parse_llama(text: str, schemas: Schemas) -> list[GeneratedToolCall] | None:
    """Parse JSON objects that are separated by semicolons as tool calls."""
    decoder, values, at = json.JSONDecoder(), [], 0
    text = text.strip().rstrip(";")
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return None
        values.append(value)
        at += len(text[at:]) - len(text[at:].lstrip("; \n"))
    return _calls_of(values, schemas)


_MISTRAL = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?\s*(\{.*)", re.DOTALL)


def _parse_mistral(text: str, schemas: Schemas) -> list[GeneratedToolCall] | None:
    """Parse a JSON list of calls, or calls of the newer form ``name[ARGS]{...}``."""
    values = _load(text)
    if isinstance(values, list):
        return _calls_of(values, schemas)
    matches = [_MISTRAL.fullmatch(part) for part in text.split("[TOOL_CALLS]")]
    return _named_calls([(m[1], m[2]) if m else ("", "") for m in matches], schemas)


_DEEPSEEK = re.compile(
    r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>([^\n<]+)\n```json\n(.*?)\n```"
    r"|([^\n<]+)<｜tool▁sep｜>(.*?))\s*<｜tool▁call▁end｜>",
    re.DOTALL,
)


def _parse_deepseek(text: str, schemas: Schemas) -> list[GeneratedToolCall] | None:
    matches = _DEEPSEEK.findall(text)
    return _named_calls([(old or new, o_args or n_args) for old, o_args, new, n_args in matches],
                        schemas)  # fmt: skip


def _named_calls(
    matches: list[tuple[str, str]], schemas: Schemas
) -> list[GeneratedToolCall] | None:
    values = [{"name": name.strip(), "arguments": _load(text)} for name, text in matches]
    if not all(isinstance(value["arguments"], dict) for value in values):
        return None
    return _calls_of(values, schemas)


_GLM = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_CODER = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>)?\s*", re.DOTALL)
_CODER_VALUE = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _parse_glm(text: str, schemas: Schemas) -> list[GeneratedToolCall] | None:
    name = text.partition("<arg_key>")[0].strip()
    return _typed_call(name, _GLM.findall(text), schemas)


def _parse_coder(text: str, schemas: Schemas) -> list[GeneratedToolCall] | None:
    matches = _CODER.fullmatch(text)
    return (
        None
        if matches is None
        else _typed_call(matches[1], _CODER_VALUE.findall(matches[2]), schemas)
    )


def _typed_call(
    name: str, pairs: list[tuple[str, str]], schemas: Schemas
) -> list[GeneratedToolCall] | None:
    """Build a call from arguments given as strings; convert them to the types in the schema."""
    if name not in schemas:
        return None
    properties = (schemas[name] or {}).get("properties", {})
    arguments = {}
    for key, text in pairs:
        value = None
        if properties.get(key.strip(), {}).get("type") != "string":
            value = _load(text)
        arguments[key.strip()] = text if value is None and text.strip() != "null" else value
    return [GeneratedToolCall(name, json.dumps(arguments, ensure_ascii=False))]


def _parse_python(text: str, schemas: Schemas) -> list[GeneratedToolCall] | None:
    """Parse calls written as Python with literal keyword arguments; no code is executed."""
    text = text.strip().removeprefix("```python").removesuffix("```").strip()
    try:
        lines = ast.parse(text).body
        calls = []
        for line in lines:
            call = line.value if isinstance(line, ast.Expr) else None
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
                return None
            arguments = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
            calls.append({"name": call.func.id, "arguments": arguments})
        return _calls_of(calls, schemas)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


# In the order in which templates are searched: more specific marks come first.
FORMATS = {
    row.name: row
    for row in (
        ToolFormat(
            "qwen3_coder", ("<function=",), ("<tool_call>",), "</tool_call>", _parse_coder
        ),
        ToolFormat("glm45", ("<arg_key>",), ("<tool_call>",), "</tool_call>", _parse_glm),
        ToolFormat(
            "deepseek_v3", ("<｜tool▁calls▁begin｜>",), ("<｜tool▁calls▁begin｜>",),
            "<｜tool▁calls▁end｜>", _parse_deepseek,
        ),
        ToolFormat("mistral", ("[TOOL_CALLS]",), ("[TOOL_CALLS]",), "", _parse_mistral),
        ToolFormat(
            "minicpm", ("<|tool_call_start|>",), ("<|tool_call_start|>",), "<|tool_call_end|>",
            _parse_python,
        ),
        ToolFormat(
            "hermes", ("<tool_call>",), ("<tool_call>",), "</tool_call>", _parse_json, is_json=True
        ),
        ToolFormat(
            "llama3_json", ('"parameters"', "ipython"), ("<|python_tag|>", ""), "", _parse_llama
        ),
    )
}  # fmt: skip


def find_format(source: str) -> ToolFormat | None:
    """Return the format of tool calls in a chat template; None without a known format."""
    if "tools" not in source:
        return None
    return next((row for row in FORMATS.values() if all(m in source for m in row.marks)), None)

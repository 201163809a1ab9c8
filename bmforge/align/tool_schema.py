"""JSON schemas of Python functions, for chat templates that describe tools."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable
from typing import Any

__all__ = ["describe_function"]

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array"}


def describe_function(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the schema of a function in OpenAI's format.

    Types are taken from the annotations (str, int, float, bool, list, dict, and None in a union),
    and descriptions from the docstring in Google style.
    """
    hints = typing.get_type_hints(function)
    text = inspect.getdoc(function) or ""
    about = dict(re.findall(r"^ +(\w+)[^:\n]*: (.+)$", text, re.MULTILINE))
    properties, required = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        properties[name] = _type_of(hints.get(name))
        if name in about:
            properties[name]["description"] = about[name]
        if parameter.default is parameter.empty:
            required.append(name)
    parameters = {"type": "object", "properties": properties, "required": required}
    name = getattr(function, "__name__", type(function).__name__)
    described = {"name": name, "description": text.split("\n\n")[0], "parameters": parameters}
    return {"type": "function", "function": described}


def _type_of(hint: Any) -> dict[str, Any]:
    """Return the JSON schema of an annotation; {} (any value) if there is no annotation."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = [_type_of(part) for part in typing.get_args(hint) if part is not type(None)]
        return kinds[0] if len(kinds) == 1 else {}
    kind = typing.get_origin(hint) or hint
    if kind is dict:
        return {"type": "object"}
    schema: dict[str, Any] = {"type": _TYPES[kind]} if kind in _TYPES else {}
    if kind is list and typing.get_args(hint):
        schema["items"] = _type_of(typing.get_args(hint)[0])
    return schema

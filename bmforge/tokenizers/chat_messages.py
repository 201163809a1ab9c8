"""Normalizes messages to the form that chat templates expect, in training and in serving."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from bmforge.errors import DataError

__all__ = [
    "THOUGHT_FIELDS",
    "THOUGHT_MARKS",
    "TOOL_ROLES",
    "Message",
    "Tools",
    "normalize_message",
    "parse_arguments",
]

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]

# Fields in which data sets and servers store the assistant's reasoning.
THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
# Delimiters of reasoning in a text: DeepSeek-R1, Qwen3, GLM-4.5; Mistral; MiniCPM.
THOUGHT_MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|thought_start|>", "<|thought_end|>"),
)
# Roles of messages with the result of a tool; their `name` is the name of the tool.
TOOL_ROLES = ("tool", "function")


def normalize_message(
    values: Mapping[str, Any], location: str = "the conversation", images: bool = False
) -> Message:
    """Convert a message in OpenAI's format to the form that chat templates expect.

    Text parts of the content are joined, null content becomes an empty text, the arguments of tool
    calls become objects (transformers' templates write them with ``tojson``), the role
    ``developer`` becomes ``system``, and null fields are removed.

    Args:
        values: message in OpenAI's format.
        location: file and line, for error messages.
        images: whether the content may have images, as parts of the type ``image`` or
            ``image_url``; it is then a list of parts.

    Raises:
        DataError: the content is not text, or a tool call has no function name.
    """
    message = {key: value for key, value in values.items() if value is not None}
    if message["role"] == "developer":
        message["role"] = "system"
    calls = message.pop("tool_calls", None) or []
    if message.pop("function_call", None):  # OpenAI's older format
        calls = [*calls, {"type": "function", "function": values["function_call"]}]
    if "content" not in message and not (calls or _has_thought(message)):
        raise DataError(
            f"{location} has a message without 'content' (needed: a string). Add 'content' to each "
            "entry of 'messages'."
        )
    content = message.get("content", "")
    if images and isinstance(content, list) and any(map(_is_image, content)):
        message["content"] = [_normalize_part(part, location) for part in content]
    else:
        message["content"] = _join_parts(content, location)
    if calls:
        message["tool_calls"] = [_normalize_call(call, location) for call in calls]
    return message


def _has_thought(message: Message) -> bool:
    return any(message.get(name) for name in THOUGHT_FIELDS)


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("image", "image_url")


def _normalize_part(part: Any, location: str) -> dict[str, Any]:
    """Return a part of the type ``text``, or of the type ``image`` with its source as ``image``."""
    if not _is_image(part):
        return {"type": "text", "text": _join_parts([part], location)}
    source = next((part[n] for n in ("image_url", "image", "url", "path") if part.get(n)), None)
    if isinstance(source, dict):
        source = source.get("url")
    return {"type": "image", **({} if source is None else {"image": source})}


def _join_parts(content: Any, location: str) -> str:
    """Return the content of a message as one text; text parts of a list are joined."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise DataError(
                f"{location} has a message with content of type {kind!r} (supported: a string, or "
                "a list of parts of type 'text')."
            )
    return "".join(texts)


def _normalize_call(call: Any, location: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(
            f"{location} has a tool call without a function name (needed: 'function.name')."
        )
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = parse_arguments(arguments)
    outer = {key: value for key, value in call.items() if value is not None and "function" in call}
    return {
        **outer,
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def parse_arguments(text: str) -> Any:
    """Parse the JSON arguments of a function call; other text is returned unchanged."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text

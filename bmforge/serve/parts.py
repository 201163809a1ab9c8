"""Parts of an answer that clients receive: text, reasoning and tool calls."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["GeneratedToolCall", "CallPiece", "CallStart", "JoinedAnswer", "Part", "Thought"]


@dataclass(frozen=True)
class Thought:
    """Chunk of the reasoning that the model writes before its answer."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """Start of a tool call; `name` is the called function."""

    name: str


@dataclass(frozen=True)
class CallPiece:
    """Chunk of the JSON arguments of the most recent tool call."""

    text: str


Part = str | Thought | CallStart | CallPiece


@dataclass(frozen=True)
class GeneratedToolCall:
    """Complete tool call.

    Args:
        name: name of the function.
        arguments: arguments as a JSON object in text form.
        id: id that the client sends back with the result (default: a new random id).
    """

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}", compare=False)

    def as_json(self) -> dict[str, Any]:
        """Return the tool call in the JSON format of chat completions."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True)
class JoinedAnswer:
    """Complete answer: text, reasoning and tool calls.

    Args:
        text: visible text, without reasoning and tool calls.
        thoughts: reasoning before the answer; "" if there is none.
        calls: tool calls in order.
        has_calls: True if the answer has tool calls, and a stop string has not cut the last one.
    """

    text: str
    thoughts: str
    calls: tuple[GeneratedToolCall, ...]
    has_calls: bool = field(default=False, compare=False)

    @classmethod
    def join(cls, parts: Iterable[Part]) -> JoinedAnswer:
        """Join the streamed chunks of an answer."""
        text, thoughts = "", ""
        calls: list[GeneratedToolCall] = []
        for part in parts:
            if isinstance(part, str):
                text += part
            elif isinstance(part, Thought):
                thoughts += part.text
            elif isinstance(part, CallStart):
                calls.append(GeneratedToolCall(part.name, ""))
            else:
                last = calls[-1]
                calls[-1] = GeneratedToolCall(last.name, last.arguments + part.text, last.id)
        return cls(text.strip() if calls else text, thoughts, tuple(calls))

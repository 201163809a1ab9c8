"""Responses in OpenAI's format from an engine's completions."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from bmforge.infer.engine.request import Completion, TokenLogprob
from bmforge.serve.tools import Call, CallReader, ToolUse, read_call

__all__ = [
    "DONE",
    "Head",
    "Reading",
    "chat_choice",
    "chat_logprobs",
    "event",
    "finish_name",
    "text_logprobs",
    "usage_of",
]

DONE = b"data: [DONE]\n\n"
_LEAST = -9999.0  # JSON cannot represent -inf
# An answer cut by a deadline or a stopping server is as incomplete as one at its length limit.
_FINISHES = {"stop": "stop", "length": "length", "deadline": "length", "cancelled": "length"}


def event(value: Any) -> bytes:
    """Encode one server-sent event."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode("utf-8", "replace")


def finish_name(reason: str) -> str:
    """Return OpenAI's finish reason."""
    return _FINISHES[reason]


@dataclass(frozen=True)
class Head:
    """Common fields of all parts of one response.

    Args:
        object: type of the response object.
        model: name of the model.
        prefix: prefix of the response's id.
    """

    object: str
    model: str
    prefix: str
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def as_json(self, choices: Sequence[Any], **more: Any) -> dict[str, Any]:
        """Return a response object, whole or a chunk."""
        return {
            "id": f"{self.prefix}-{self.id}",
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "choices": list(choices),
            **more,
        }


def usage_of(completions: Sequence[Sequence[Completion]]) -> dict[str, Any]:
    """Return the token usage of a request; a prompt counts once for all its answers."""
    prompt = sum(answers[0].prompt_tokens for answers in completions)
    cached = sum(answers[0].cached_tokens for answers in completions)
    new = sum(len(answer.ids) for answers in completions for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Reading:
    """Parser of one answer's text: separates visible text from tool calls.

    Args:
        tools: tools that may be called.
        begins: prefix of the answer that is not shown.
    """

    def __init__(self, tools: ToolUse, begins: str = "") -> None:
        self._tools, self._begins, self._start = tools, begins, ""
        self._is_forced = tools.rule is not None
        self._whole: list[str] = []
        self._count = 0
        self._calls = CallReader(tools.names) if tools.names and not self._is_forced else None
        self.has_calls = False

    def feed(self, text: str) -> Iterator[str | Call]:
        """Yield text and calls that are complete after the next piece of text."""
        if self._is_forced:
            self._whole.append(text)
            return
        text = self._skip(text)
        if self._calls is None:
            yield from (text,) if text else ()
            return
        for part in self._calls.feed(text):
            if self._count == self._tools.max_calls:
                return  # nothing follows the last call that the client accepts
            self._count += isinstance(part, Call)
            self.has_calls |= isinstance(part, Call)
            yield part

    def _skip(self, text: str) -> str:
        """Remove the hidden prefix of an answer."""
        if not self._begins:
            return text
        self._start += text
        if len(self._start) < len(self._begins) and self._begins.startswith(self._start):
            return ""
        text, self._begins = self._start.removeprefix(self._begins), ""
        return text

    def end(self) -> Iterator[str | Call]:
        """Yield the rest at the end of the answer."""
        if self._is_forced:
            text = "".join(self._whole)
            call = read_call(text, self._tools.names)
            self.has_calls = call is not None
            yield call if call is not None else text
            return
        if self._count == self._tools.max_calls:
            return
        buffered = self._start if self._begins else ""
        buffered = "".join([buffered, self._calls.end() if self._calls else ""])
        if buffered:
            yield buffered


def chat_choice(answer: Completion, tools: ToolUse, begins: str, tells: bool) -> dict[str, Any]:
    """Return a choice of a chat response.

    Args:
        answer: completion of the engine.
        tools: tools that may be called.
        begins: prefix of the answer that is not shown.
        tells: the request asks for log-probabilities.
    """
    reading = Reading(tools, begins)
    parts = [*reading.feed(answer.text), *reading.end()]
    text = "".join(part for part in parts if isinstance(part, str))
    calls = [part.as_json() for part in parts if isinstance(part, Call)]
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if calls:
        message |= {"content": text.strip() or None, "tool_calls": calls}
    return {
        "index": answer.index,
        "message": message,
        "logprobs": chat_logprobs(answer.logprobs or ()) if tells else None,
        "finish_reason": "tool_calls" if calls else finish_name(answer.finish_reason),
    }


def chat_logprobs(tokens: Collection[TokenLogprob]) -> dict[str, Any]:
    """Return token log-probabilities in the chat format."""

    def describe(token: TokenLogprob) -> dict[str, Any]:
        return {
            "token": token.data.decode("utf-8", "replace"),
            "logprob": max(token.logprob, _LEAST),
            "bytes": list(token.data),
        }

    content = [
        {**describe(token), "top_logprobs": [describe(top) for top in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def text_logprobs(tokens: Collection[TokenLogprob], offset: int) -> dict[str, Any]:
    """Return token log-probabilities in the completions format.

    Args:
        tokens: generated tokens.
        offset: number of characters generated before them.
    """
    texts = [token.data.decode("utf-8", "replace") for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [max(token.logprob, _LEAST) for token in tokens],
        "top_logprobs": [
            {top.data.decode("utf-8", "replace"): max(top.logprob, _LEAST) for top in token.top}
            for token in tokens
        ],
        "text_offset": offsets,
    }

"""What an engine has written, in the form in which OpenAI's clients read it."""

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
_LEAST = -9999.0  # JSON has no infinity
# A deadline and a server that stops leave an answer as unfinished as a limit does.
_FINISHES = {"stop": "stop", "length": "length", "deadline": "length", "cancelled": "length"}


def event(value: Any) -> bytes:
    """Return one event of a stream."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode("utf-8", "replace")


def finish_name(reason: str) -> str:
    """Return OpenAI's name for why an answer ended."""
    return _FINISHES[reason]


@dataclass(frozen=True)
class Head:
    """What stands in every part of one answer.

    Args:
        object: what it is.
        model: its name.
        prefix: of the id.
    """

    object: str
    model: str
    prefix: str
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def as_json(self, choices: Sequence[Any], **more: Any) -> dict[str, Any]:
        """Return a whole answer, or a part of it."""
        return {
            "id": f"{self.prefix}-{self.id}",
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "choices": list(choices),
            **more,
        }


def usage_of(completions: Sequence[Sequence[Completion]]) -> dict[str, Any]:
    """Return what answers took; a prompt counts once for all its answers."""
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
    """One answer on its way to a client: what is shown of it, and the calls in it.

    Args:
        tools: what may be called.
        begins: what an answer may begin with that is not shown.
    """

    def __init__(self, tools: ToolUse, begins: str = "") -> None:
        self._tools, self._begins, self._start = tools, begins, ""
        self._is_forced = tools.rule is not None
        self._whole: list[str] = []
        self._count = 0
        self._calls = CallReader(tools.names) if tools.names and not self._is_forced else None
        self.has_calls = False

    def feed(self, text: str) -> Iterator[str | Call]:
        """Yield what can be shown of what was written so far."""
        if self._is_forced:
            self._whole.append(text)
            return
        text = self._skip(text)
        if self._calls is None:
            yield from (text,) if text else ()
            return
        for found in self._calls.feed(text):
            if self._count == self._tools.max_calls:
                return  # nothing follows the last call that the client accepts
            self._count += isinstance(found, Call)
            self.has_calls |= isinstance(found, Call)
            yield found

    def _skip(self, text: str) -> str:
        """Leave out what an answer begins with."""
        if not self._begins:
            return text
        self._start += text
        if len(self._start) < len(self._begins) and self._begins.startswith(self._start):
            return ""
        text, self._begins = self._start.removeprefix(self._begins), ""
        return text

    def end(self) -> Iterator[str | Call]:
        """Yield what was held back."""
        if self._is_forced:
            text = "".join(self._whole)
            call = read_call(text, self._tools.names)
            self.has_calls = call is not None
            yield call if call is not None else text
            return
        if self._count == self._tools.max_calls:
            return
        rest = self._start if self._begins else ""
        rest = "".join(one for one in [rest, self._calls.end() if self._calls else ""])
        if rest:
            yield rest


def chat_choice(answer: Completion, tools: ToolUse, begins: str, tells: bool) -> dict[str, Any]:
    """Return a whole answer of a chat.

    Args:
        answer: of the engine.
        tools: what may be called.
        begins: what it may begin with that is not shown.
        tells: whether probabilities were asked for.
    """
    reading = Reading(tools, begins)
    found = [*reading.feed(answer.text), *reading.end()]
    text = "".join(one for one in found if isinstance(one, str))
    calls = [one.as_json() for one in found if isinstance(one, Call)]
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
    """Return the probabilities of tokens as a chat tells them."""

    def one(token: TokenLogprob) -> dict[str, Any]:
        return {
            "token": token.data.decode("utf-8", "replace"),
            "logprob": max(token.logprob, _LEAST),
            "bytes": list(token.data),
        }

    content = [{**one(token), "top_logprobs": [one(top) for top in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def text_logprobs(tokens: Collection[TokenLogprob], offset: int) -> dict[str, Any]:
    """Return the probabilities of tokens as a completion tells them.

    Args:
        tokens: that were written.
        offset: characters that were written before.
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

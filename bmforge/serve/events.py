"""Streams answers as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from bmforge.serve.answers import (
    DONE,
    ResponseFields,
    TextLogprobs,
    chat_finish,
    chat_logprobs,
    encode_event,
    finish_name,
    usage_of,
)
from bmforge.serve.chat_requests import RunningChat, received_pieces
from bmforge.serve.errors import RequestError, error_body
from bmforge.serve.live_requests import LiveRequest
from bmforge.serve.openai_types import CompletionRequest, GenerationRequest
from bmforge.serve.parts import CallStart, GeneratedToolCall, Part, Thought
from bmforge.serve.serving import Serving

__all__ = ["PULSE", "chat_events", "text_events"]

PULSE = b": still there\n\n"


async def chat_events(chat: RunningChat) -> AsyncIterator[bytes]:
    """Yield the server-sent events of a chat completion."""
    body, head = chat.body, ResponseFields("chat.completion.chunk", chat.body.model, "chatcmpl")
    usage = RunningUsage(body, chat.live)
    readings = [chat.reading() for _ in range(body.count)]
    deltas = [Deltas(body.include_reasoning is not False) for _ in range(body.count)]

    def part(index: int, delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        return encode_event(head.as_json([{**choice, **more}], **usage.as_json()))

    for index in range(body.count):
        yield part(index, {"role": "assistant", "content": ""})
    try:
        async for item in chat.pieces():
            if item is None:
                yield PULSE
                continue
            piece = item[1]
            usage.new_tokens += len(piece.ids)
            index, reading = piece.index, readings[piece.index]
            extra: dict[str, Any] = {}
            if piece.logprobs:
                extra = {"logprobs": chat_logprobs(piece.logprobs)}
            contents: list[Part] = [*reading.feed(piece.text)]
            if piece.finish_reason is not None:
                contents += reading.end()
            shown = [delta for content in contents if (delta := deltas[index].show(content))]
            for delta in shown or ([{"content": ""}] if extra else []):
                yield part(index, delta, None, **extra)
                extra = {}
            if piece.finish_reason is not None:
                yield part(index, {}, chat_finish(piece.finish_reason, reading.has_calls))
    except RequestError as error:
        yield encode_event(error_body(error))
        return
    if body.wants_usage:
        yield encode_event(head.as_json([], usage=usage_of(chat.live.completions(), chat.span)))
    yield DONE


class RunningUsage:
    """Token usage in the chunks of a stream.

    Args:
        body: request body.
        live: running engine request.

    Attributes:
        new_tokens: number of generated tokens in the chunks so far.
    """

    def __init__(self, body: GenerationRequest, live: LiveRequest) -> None:
        self._body, self._prompt_tokens, self.new_tokens = body, live.prompt_tokens, 0

    def as_json(self) -> dict[str, Any]:
        """Return the field `usage` of a chunk; null unless `continuous_usage_stats` is set."""
        if not self._body.wants_usage:
            return {}
        if not self._body.wants_running_usage:
            return {"usage": None}
        new, prompt = self.new_tokens, self._prompt_tokens
        counts = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        return {"usage": counts}


class Deltas:
    """Converts text, reasoning and tool calls of one answer to the deltas of chat completions.

    Args:
        has_thoughts: True if reasoning is shown.
    """

    def __init__(self, has_thoughts: bool = True) -> None:
        self._has_thoughts, self._calls = has_thoughts, 0

    def show(self, part: Part) -> dict[str, Any] | None:
        """Convert a part of an answer to the `delta` of a chunk; None if the part is not sent."""
        if isinstance(part, str):
            return {"content": part}
        if isinstance(part, Thought):
            return {"reasoning_content": part.text} if self._has_thoughts else None
        if isinstance(part, CallStart):
            self._calls += 1
            call = GeneratedToolCall(part.name, "").as_json()
            return {"tool_calls": [{"index": self._calls - 1, **call}]}
        function = {"arguments": part.text}
        return {"tool_calls": [{"index": self._calls - 1, "function": function}]}


async def text_events(
    serving: Serving, live: LiveRequest, body: CompletionRequest
) -> AsyncIterator[bytes]:
    """Yield the server-sent events of text completions."""
    head = ResponseFields("text_completion", body.model, "cmpl")
    usage = RunningUsage(body, live)
    writers: dict[int, TextLogprobs] = {}
    try:
        async for item in received_pieces(serving, live):
            if item is None:
                yield PULSE
                continue
            number, piece = item
            usage.new_tokens += len(piece.ids)
            index, logprobs = number * body.count + piece.index, None
            if body.logprobs is not None and piece.logprobs:
                logprobs = writers.setdefault(index, TextLogprobs()).write(piece.logprobs)
            reason = piece.finish_reason
            choice = {
                "index": index,
                "text": piece.text,
                "logprobs": logprobs,
                "finish_reason": None if reason is None else finish_name(reason),
            }
            if piece.text or logprobs or reason:
                yield encode_event(head.as_json([choice], **usage.as_json()))
    except RequestError as error:
        yield encode_event(error_body(error))
        return
    if body.wants_usage:
        yield encode_event(head.as_json([], usage=usage_of(live.completions())))
    yield DONE

"""Streaming of answers as server-sent events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from bmforge.infer.engine.request import Piece
from bmforge.serve.answers import (
    DONE,
    Head,
    Reading,
    chat_logprobs,
    event,
    finish_name,
    text_logprobs,
    usage_of,
)
from bmforge.serve.errors import RequestError, error_body, overloaded
from bmforge.serve.live import LiveRequest
from bmforge.serve.openai_types import ChatRequest, CompletionRequest
from bmforge.serve.serving import Serving
from bmforge.serve.tools import Call, ToolUse

__all__ = ["chat_events", "text_events"]

_PULSE = b": still there\n\n"


async def _pieces(
    serving: Serving, live: LiveRequest, begin: float
) -> AsyncIterator[tuple[int, Piece] | None]:
    """Yield pieces of the answers and update the metrics.

    Raises:
        RequestError: the engine failed, or the server is stopping.
    """
    is_first = True
    async for item in live.pieces():
        if item is not None and is_first:
            serving.metrics.note_first(time.monotonic() - begin)
            is_first = False
        if item is not None and item[1].finish_reason == "cancelled":
            raise overloaded("the server is stopping", serving.config.grace_s)
        yield item
    serving.metrics.note_answers(live.completions())


async def chat_events(
    serving: Serving,
    live: LiveRequest,
    body: ChatRequest,
    tools: ToolUse,
    begins: str,
    begin: float,
) -> AsyncIterator[bytes]:
    """Yield the events of a chat completion.

    Args:
        serving: server state.
        live: running request.
        body: request body.
        tools: tools that may be called.
        begins: prefix of the answer that is not shown.
        begin: arrival time of the request, of the monotonic clock.
    """
    head = Head("chat.completion.chunk", body.model, "chatcmpl")
    no_usage: dict[str, Any] = {"usage": None} if body.wants_usage else {}
    readings = [Reading(tools, begins) for _ in range(body.count)]
    calls = [0] * body.count

    def part(index: int, delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        return event(head.as_json([{**choice, **more}], **no_usage))

    def shown(index: int, content: str | Call) -> dict[str, Any]:
        if isinstance(content, str):
            return {"content": content}
        calls[index] += 1
        return {"tool_calls": [content.as_json(calls[index] - 1)]}

    for index in range(body.count):
        yield part(index, {"role": "assistant", "content": ""})
    try:
        async for item in _pieces(serving, live, begin):
            if item is None:
                yield _PULSE
                continue
            piece = item[1]
            index, reading = piece.index, readings[piece.index]
            extra: dict[str, Any] = {}
            if piece.logprobs:
                extra = {"logprobs": chat_logprobs(piece.logprobs)}
            contents = [*reading.feed(piece.text)]
            if piece.finish_reason is not None:
                contents += reading.end()
            if extra and not contents:
                contents = [""]
            for content in contents:
                yield part(index, shown(index, content), None, **extra)
                extra = {}
            if piece.finish_reason is not None:
                name = "tool_calls" if reading.has_calls else finish_name(piece.finish_reason)
                yield part(index, {}, name)
    except RequestError as error:
        yield event(error_body(error))
        return
    if body.wants_usage:
        yield event(head.as_json([], usage=usage_of(live.completions())))
    yield DONE


async def text_events(
    serving: Serving, live: LiveRequest, body: CompletionRequest, begin: float
) -> AsyncIterator[bytes]:
    """Yield the events of text completions; see `chat_events`."""
    head = Head("text_completion", body.model, "cmpl")
    no_usage: dict[str, Any] = {"usage": None} if body.wants_usage else {}
    lengths: dict[int, int] = {}
    try:
        async for item in _pieces(serving, live, begin):
            if item is None:
                yield _PULSE
                continue
            number, piece = item
            index, logprobs = number * body.count + piece.index, None
            if body.logprobs is not None and piece.logprobs:
                logprobs = text_logprobs(piece.logprobs, lengths.get(index, 0))
                lengths[index] = lengths.get(index, 0) + sum(map(len, logprobs["tokens"]))
            reason = piece.finish_reason
            choice = {
                "index": index,
                "text": piece.text,
                "logprobs": logprobs,
                "finish_reason": None if reason is None else finish_name(reason),
            }
            if piece.text or logprobs or reason:
                yield event(head.as_json([choice], **no_usage))
    except RequestError as error:
        yield event(error_body(error))
        return
    if body.wants_usage:
        yield event(head.as_json([], usage=usage_of(live.completions())))
    yield DONE

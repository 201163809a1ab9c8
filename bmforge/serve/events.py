"""Answers as server-sent events, while they are written."""

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
    """Yield what is written, and count it.

    Raises:
        RequestError: the engine failed, or the server stops.
    """
    is_first = True
    async for found in live.pieces():
        if found is not None and is_first:
            serving.metrics.note_first(time.monotonic() - begin)
            is_first = False
        if found is not None and found[1].finish_reason == "cancelled":
            raise overloaded("the server is stopping", serving.config.grace_s)
        yield found
    serving.metrics.note_answers(live.completions())


async def chat_events(
    serving: Serving,
    live: LiveRequest,
    body: ChatRequest,
    tools: ToolUse,
    begins: str,
    begin: float,
) -> AsyncIterator[bytes]:
    """Yield the events of a chat.

    Args:
        serving: what answers.
        live: what is being written.
        body: that asked.
        tools: that may be called.
        begins: what an answer may begin with that is not shown.
        begin: when the request came, by the monotonic clock.
    """
    head = Head("chat.completion.chunk", body.model, "chatcmpl")
    no_usage: dict[str, Any] = {"usage": None} if body.wants_usage else {}
    readings = [Reading(tools, begins) for _ in range(body.count)]
    calls = [0] * body.count

    def part(index: int, delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        return event(head.as_json([{**choice, **more}], **no_usage))

    def shown(index: int, found: str | Call) -> dict[str, Any]:
        if isinstance(found, str):
            return {"content": found}
        calls[index] += 1
        return {"tool_calls": [found.as_json(calls[index] - 1)]}

    for index in range(body.count):
        yield part(index, {"role": "assistant", "content": ""})
    try:
        async for came in _pieces(serving, live, begin):
            if came is None:
                yield _PULSE
                continue
            piece = came[1]
            index, reading = piece.index, readings[piece.index]
            told: dict[str, Any] = {}
            if piece.logprobs:
                told = {"logprobs": chat_logprobs(piece.logprobs)}
            found = [*reading.feed(piece.text)]
            if piece.finish_reason is not None:
                found += reading.end()
            if told and not found:
                found = [""]
            for one in found:
                yield part(index, shown(index, one), None, **told)
                told = {}
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
    """Yield the events of completions; see `chat_events`."""
    head = Head("text_completion", body.model, "cmpl")
    no_usage: dict[str, Any] = {"usage": None} if body.wants_usage else {}
    lengths: dict[int, int] = {}
    try:
        async for came in _pieces(serving, live, begin):
            if came is None:
                yield _PULSE
                continue
            number, piece = came
            index, told = number * body.count + piece.index, None
            if body.logprobs is not None and piece.logprobs:
                told = text_logprobs(piece.logprobs, lengths.get(index, 0))
                lengths[index] = lengths.get(index, 0) + sum(map(len, told["tokens"]))
            reason = piece.finish_reason
            choice = {
                "index": index,
                "text": piece.text,
                "logprobs": told,
                "finish_reason": None if reason is None else finish_name(reason),
            }
            if piece.text or told or reason:
                yield event(head.as_json([choice], **no_usage))
    except RequestError as error:
        yield event(error_body(error))
        return
    if body.wants_usage:
        yield event(head.as_json([], usage=usage_of(live.completions())))
    yield DONE

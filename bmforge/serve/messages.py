"""Routes of ``/v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's interface."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from bmforge.infer.engine.request import Completion
from bmforge.serve.answers import encode_event, usage_of
from bmforge.serve.chat_requests import RunningChat, open_chat, read_prompt
from bmforge.serve.errors import RequestError, anthropic_error, renaming_fields
from bmforge.serve.http_json import GONE, EventStream, StrictRoute
from bmforge.serve.messages_types import CountRequest, MessagesRequest, messages_chat
from bmforge.serve.openai_types import ChatRequest
from bmforge.serve.parts import CallPiece, CallStart, JoinedAnswer, Part, Thought
from bmforge.serve.serving import serving_of

__all__ = ["router"]

router = APIRouter(route_class=StrictRoute)
_NAMES = {
    "enable_thinking": "thinking",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}
_PING = {"type": "ping"}


@router.post("/v1/messages")
async def messages(body: MessagesRequest, request: Request) -> Response:
    """Handle a request to ``/v1/messages``."""
    with renaming_fields(_NAMES):
        chat = await open_chat(await _convert(body, request), request)
    if body.stream:
        return EventStream(_events(chat, body), chat.stack.close)
    answers = await chat.answers(request)
    if answers is None:
        return Response(status_code=GONE)
    answer = answers[0]
    message = chat.message(answer)
    content = [block.as_json(is_whole=True) for block in _blocks(message)]
    head = _head(body, _usage(chat)) | {"content": content}
    return JSONResponse(head | _end(chat, body, answer, message.has_calls))


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountRequest, request: Request) -> Response:
    """Count the tokens of a conversation."""
    with renaming_fields(_NAMES):
        prompt = await read_prompt(await _convert(body, request), request)
    return JSONResponse({"input_tokens": len(prompt.ids)})


async def _convert(body: CountRequest, request: Request) -> ChatRequest:
    """Convert the request to a chat request in a thread, since a conversation may be long."""
    return await serving_of(request).tokenize(partial(messages_chat, body))


def _head(body: MessagesRequest, usage: dict[str, int]) -> dict[str, Any]:
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": body.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _usage(chat: RunningChat) -> dict[str, int]:
    """Return the token usage of a finished answer; cached tokens do not count as input tokens."""
    usage = usage_of(chat.live.completions())
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage["completion_tokens"],
    }


def _end(
    chat: RunningChat, body: MessagesRequest, answer: Completion, has_calls: bool
) -> dict[str, Any]:
    """Return the stop reason, and the stop sequence that ended the answer, if any."""
    if answer.finish_reason != "stop":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if has_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    written = chat.serving.engine.tokenizer.decode_written(answer.ids)
    after = written[len(answer.text) :]
    stops = [stop for stop in body.stop_sequences or () if after.startswith(stop)]
    if stops:
        return {"stop_reason": "stop_sequence", "stop_sequence": max(stops, key=len)}
    return {"stop_reason": "end_turn", "stop_sequence": None}


class _Block:
    """Content block of an answer in Anthropic's format.

    Args:
        kind: "text", "thinking" or "tool_use".
        name: name of the function.
    """

    def __init__(self, kind: str, name: str = "") -> None:
        self.kind, self.name, self.text = kind, name, ""
        self.id = f"toolu_{secrets.token_hex(12)}"

    def as_json(self, is_whole: bool) -> dict[str, Any]:
        """Return the block as JSON: complete, or empty for the start event of a stream."""
        text = self.text if is_whole else ""
        if self.kind == "text":
            return {"type": "text", "text": text}
        if self.kind == "thinking":
            return {"type": "thinking", "thinking": text, "signature": ""}
        try:
            arguments = json.loads(text) if text else {}
        except ValueError:  # the arguments were cut by the length limit
            arguments = {}
        return {"type": "tool_use", "id": self.id, "name": self.name, "input": arguments}

    def delta(self, text: str) -> dict[str, Any]:
        """Return the stream delta for the next text of the block."""
        if self.kind == "text":
            return {"type": "text_delta", "text": text}
        if self.kind == "thinking":
            return {"type": "thinking_delta", "thinking": text}
        return {"type": "input_json_delta", "partial_json": text}


def _blocks(message: JoinedAnswer) -> Iterator[_Block]:
    """Yield the content blocks of a complete answer."""
    for kind, text in (("thinking", message.thoughts), ("text", message.text)):
        if text:
            block = _Block(kind)
            block.text = text
            yield block
    for call in message.calls:
        block = _Block("tool_use", call.name)
        block.text = call.arguments
        yield block


class _BlockEvents:
    """Converts text, reasoning and tool calls to the stream events of content blocks."""

    def __init__(self) -> None:
        self._block: _Block | None = None
        self._count = 0

    def feed(self, part: Part) -> Iterator[dict[str, Any]]:
        """Yield the stream events for the next chunk of the answer."""
        kind, text = "text", part if isinstance(part, str) else ""
        if isinstance(part, Thought):
            kind, text = "thinking", part.text
        elif isinstance(part, CallStart | CallPiece):
            kind, text = "tool_use", "" if isinstance(part, CallStart) else part.text
        block = self._block
        if block is None or block.kind != kind or isinstance(part, CallStart):
            yield from self.close()
            block = self._block = _Block(kind, part.name if isinstance(part, CallStart) else "")
            start = {"index": self._count, "content_block": block.as_json(is_whole=False)}
            yield {"type": "content_block_start", **start}
        if text:
            yield {"type": "content_block_delta", "index": self._count, "delta": block.delta(text)}

    def close(self) -> Iterator[dict[str, Any]]:
        """Yield the event that ends the current block."""
        if self._block is not None:
            yield {"type": "content_block_stop", "index": self._count}
            self._block, self._count = None, self._count + 1


async def _events(chat: RunningChat, body: MessagesRequest) -> AsyncIterator[bytes]:
    """Yield the server-sent events of a streamed message."""

    def send(value: dict[str, Any]) -> bytes:
        return encode_event(value, value["type"])

    started = {"input_tokens": len(chat.prompt.ids), "output_tokens": 0}
    yield send({"type": "message_start", "message": _head(body, started)})
    blocks, reading = _BlockEvents(), chat.reading()
    try:
        async for item in chat.pieces():
            if item is None:
                yield send(_PING)
                continue
            parts = [*reading.feed(item[1].text)]
            if item[1].finish_reason is not None:
                parts += reading.end()
            for part in parts:
                for value in blocks.feed(part):
                    yield send(value)
    except RequestError as error:
        yield send(anthropic_error(error))
        return
    for value in blocks.close():
        yield send(value)
    answer = chat.live.completions()[0][0]
    delta = _end(chat, body, answer, reading.has_calls)
    yield send({"type": "message_delta", "delta": delta, "usage": _usage(chat)})
    yield send({"type": "message_stop"})

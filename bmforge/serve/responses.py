"""Route of ``/v1/responses``: OpenAI's newer interface, without stored state."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from bmforge.serve.answers import encode_event, usage_of
from bmforge.serve.chat_requests import RunningChat, open_chat, read_prompt
from bmforge.serve.errors import RequestError, error_body, renaming_fields
from bmforge.serve.events import PULSE
from bmforge.serve.http_json import GONE, EventStream, StrictRoute
from bmforge.serve.openai_types import ChatRequest
from bmforge.serve.parts import CallPiece, CallStart, Part, Thought
from bmforge.serve.responses_types import InputTokensRequest, ResponsesRequest, responses_chat
from bmforge.serve.serving import serving_of

__all__ = ["Items", "router"]

router = APIRouter(route_class=StrictRoute)
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}


@router.post("/v1/responses")
async def respond(body: ResponsesRequest, request: Request) -> Response:
    """Handle a request to ``/v1/responses``."""
    with renaming_fields(_NAMES):
        chat = await open_chat(await _convert(body, request), request)
    head = _head(body)
    if body.stream:
        return EventStream(_events(chat, head), chat.stack.close)
    answers = await chat.answers(request)
    if answers is None:
        return Response(status_code=GONE)
    answer, items, reading = answers[0], Items(), chat.reading()
    for part in (*reading.feed(answer.text), *reading.end()):
        for _ in items.feed(part):
            pass
    for _ in items.close(answer.finish_reason == "stop" and not reading.is_cut):
        pass
    return JSONResponse(_finished(head, chat, items, answer.finish_reason))


@router.post("/v1/responses/input_tokens")
async def count_tokens(body: InputTokensRequest, request: Request) -> Response:
    """Count the tokens of a conversation."""
    with renaming_fields(_NAMES):
        prompt = await read_prompt(await _convert(body, request), request)
    return JSONResponse({"object": "response.input_tokens", "input_tokens": len(prompt.ids)})


async def _convert(body: InputTokensRequest, request: Request) -> ChatRequest:
    """Convert the request to a chat request in a thread, since a conversation may be long."""
    return await serving_of(request).tokenize(partial(responses_chat, body))


def _head(body: ResponsesRequest) -> dict[str, Any]:
    """Return the fields of a response that do not depend on the answer."""
    form = None if body.text is None else body.text.format
    shown = form or {"type": "text"}
    tools = [tool.model_dump() for tool in body.tools or ()]
    reasoning = body.reasoning
    return {
        "id": f"resp_{secrets.token_hex(16)}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": body.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "store": False,
        "temperature": body.temperature,
        "text": {"format": shown if form is None else form.model_dump(by_alias=True)},
        "tool_choice": body.model_dump(include={"tool_choice"})["tool_choice"] or "auto",
        "tools": tools,
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
        "metadata": body.metadata or {},
    }


def _finished(head: dict[str, Any], chat: RunningChat, items: Items, reason: str) -> dict[str, Any]:
    usage = usage_of(chat.live.completions(), chat.span)
    thoughts = usage.get("completion_tokens_details", {"reasoning_tokens": 0})
    is_whole = reason == "stop"
    return head | {
        "status": "completed" if is_whole else "incomplete",
        "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
        "output": items.done,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": thoughts,
            "total_tokens": usage["total_tokens"],
        },
    }


async def _events(chat: RunningChat, head: dict[str, Any]) -> AsyncIterator[bytes]:
    """Yield the server-sent events of a streamed response."""
    items, reading, number, reason = Items(), chat.reading(), 0, "stop"

    def send(kind: str, **fields: Any) -> bytes:
        nonlocal number
        number += 1
        return encode_event({"type": kind, "sequence_number": number - 1, **fields}, kind)

    yield send("response.created", response=head)
    yield send("response.in_progress", response=head)
    try:
        async for item in chat.pieces():
            if item is None:
                yield PULSE
                continue
            piece = item[1]
            parts = [*reading.feed(piece.text)]
            if piece.finish_reason is not None:
                parts, reason = [*parts, *reading.end()], piece.finish_reason
            for part in parts:
                for kind, fields in items.feed(part):
                    yield send(kind, **fields)
    except RequestError as error:
        failed = {"code": "server_error", "message": error.message}
        yield send("error", **error_body(error)["error"])
        yield send("response.failed", response=head | {"status": "failed", "error": failed})
        return
    for kind, fields in items.close(reason == "stop" and not reading.is_cut):
        yield send(kind, **fields)
    response = _finished(head, chat, items, reason)
    yield send(f"response.{response['status']}", response=response)


Event = tuple[str, dict[str, Any]]


class Items:
    """Converts text, reasoning and tool calls to output items and their stream events.

    Attributes:
        done: finished items.
    """

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self._kind, self._text = "", ""
        self._item: dict[str, Any] = {}

    def feed(self, part: Part) -> Iterator[Event]:
        """Yield the stream events for the next chunk of the answer."""
        if isinstance(part, CallPiece):
            kind, text = "function_call", part.text
        elif isinstance(part, CallStart):
            kind, text = "function_call", ""
        elif isinstance(part, Thought):
            kind, text = "reasoning", part.text
        else:
            kind, text = "message", part
        if kind != self._kind or isinstance(part, CallStart):
            yield from self.close()
            yield from self._begin(kind, part.name if isinstance(part, CallStart) else "")
        if text:
            self._text += text
            name = {"message": "output_text", "reasoning": "reasoning_text"}.get(kind)
            name = name or "function_call_arguments"
            more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            yield f"response.{name}.delta", {**self._place(), "delta": text, **more}

    def _place(self) -> dict[str, Any]:
        position = {"item_id": self._item["id"], "output_index": len(self.done)}
        return position if self._kind == "function_call" else {**position, "content_index": 0}

    def _begin(self, kind: str, name: str) -> Iterator[Event]:
        """Begin a new output item."""
        self._kind, self._text = kind, ""
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        code = secrets.token_hex(12)
        self._item = {"id": f"{prefix}_{code}", "type": kind, "status": "in_progress"}
        if kind == "message":
            self._item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            self._item |= {"summary": [], "content": []}
        else:
            self._item |= {"call_id": f"call_{code}", "name": name, "arguments": ""}
        item = dict(self._item)
        yield "response.output_item.added", {"output_index": len(self.done), "item": item}
        if kind != "function_call":
            yield "response.content_part.added", {**self._place(), "part": self._content("")}

    def _content(self, text: str) -> dict[str, Any]:
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def close(self, is_whole: bool = True) -> Iterator[Event]:
        """Yield the stream events that end the current item."""
        if not self._kind:
            return
        text, position = self._text, self._place()
        if self._kind == "function_call":
            self._item["arguments"] = text
            fields = {**position, "arguments": text, "name": self._item["name"]}
            yield "response.function_call_arguments.done", fields
        else:
            part = self._content(text)
            self._item["content"] = [part]
            name = "output_text" if self._kind == "message" else "reasoning_text"
            more: dict[str, Any] = {"logprobs": []} if self._kind == "message" else {}
            yield f"response.{name}.done", {**position, "text": text, **more}
            yield "response.content_part.done", {**position, "part": part}
        self._item["status"] = "completed" if is_whole else "incomplete"
        number = len(self.done)
        self.done.append(self._item)
        self._kind = ""
        yield "response.output_item.done", {"output_index": number, "item": self._item}

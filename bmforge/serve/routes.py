"""Routes of chat and text completions, and their conversion to engine requests."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from bmforge.errors import BmforgeError
from bmforge.infer.engine.request import Completion
from bmforge.infer.engine.request import Request as EngineRequest
from bmforge.serve.answers import Head, chat_choice, finish_name, text_logprobs, usage_of
from bmforge.serve.errors import RequestError, overloaded
from bmforge.serve.events import chat_events, text_events
from bmforge.serve.live import GoneError, LiveRequest, unless_gone
from bmforge.serve.openai_types import ChatRequest, CompletionRequest
from bmforge.serve.serving import Serving, client_of, key_of, serving_of
from bmforge.serve.strict_json import parse_json
from bmforge.serve.tools import find_tools
from bmforge.serve.writing import (
    check_limits,
    check_size,
    find_constraint,
    longest_answer,
    to_options,
)

__all__ = ["GONE", "StrictRoute", "check_engine", "router"]

_LARGE = 1 << 16
_COMPLETION_TOKENS = 16  # OpenAI's default for text completions
GONE = 499


class StrictRequest(Request):
    """A request with a limited body, parsed by `parse_json`."""

    async def body(self) -> bytes:
        """Return the body.

        Raises:
            RequestError: 413, too large by its Content-Length or by its actual size.
        """
        if not hasattr(self, "_body"):
            most = self.app.state.serving.config.max_body_bytes
            too_large = RequestError(f"the body has more than {most} bytes", status=413)
            if int(self.headers.get("content-length", "0")) > most:
                raise too_large
            chunks, size = [], 0
            async for chunk in self.stream():
                chunks.append(chunk)
                size += len(chunk)
                if size > most:
                    raise too_large
            self._body = b"".join(chunks)
        return self._body

    async def json(self) -> Any:
        """Return the parsed body; a large one is parsed in a thread."""
        if not hasattr(self, "_json"):
            body, config = await self.body(), self.app.state.serving.config
            if len(body) > _LARGE:
                self._json = await run_in_threadpool(parse_json, body, config)
            else:
                self._json = parse_json(body, config)
        return self._json


class StrictRoute(APIRoute):
    """A route with strict JSON parsing."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        """Return the handler of a request."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(StrictRequest(request.scope, request.receive))

        return handle


router = APIRouter(route_class=StrictRoute)


class EventStream(StreamingResponse):
    """Server-sent events, with a callback at their end.

    Args:
        events: encoded events.
        on_end: called at the end, also if nothing was sent.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], on_end: Callable[[], None]) -> None:
        super().__init__(events, headers={"x-accel-buffering": "no"})
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


async def check_engine(serving: Serving, engine: Any) -> None:
    """Raise an error if an engine is closed or has failed, and not only refuses one request.

    Raises:
        RequestError: 503, the engine was closed or has failed.
    """
    try:
        await run_in_threadpool(engine.call, lambda: None)
    except BmforgeError as error:
        serving.is_failed = serving.is_failed or engine is serving.engine
        raise RequestError(
            "the engine was closed, or has failed", status=503, code="engine_failed"
        ) from error


async def start(
    serving: Serving, requests: Sequence[EngineRequest], prompt_tokens: int
) -> LiveRequest:
    """Submit requests to the engine; `prompt_tokens` is the number of all of their tokens.

    Raises:
        RequestError: the engine refuses one.
    """
    handles = []
    try:
        for request in requests:
            handles.append(await run_in_threadpool(serving.engine.submit, request))
    except BmforgeError as error:
        for handle in handles:
            handle.cancel()
        await check_engine(serving, serving.engine)
        raise RequestError(str(error), code="invalid_value") from error
    live = LiveRequest(handles, serving.config.max_unread_bytes, prompt_tokens)
    serving.live.add(live)
    return live


@router.post("/v1/chat/completions")
async def chat(body: ChatRequest, request: Request) -> Response:
    """Answer a chat completion request."""
    begin = time.monotonic()
    serving = serving_of(request)
    served = serving.find(body.model, "chat")
    config, engine = serving.config, serving.engine
    check_limits(body, config)
    tools = find_tools(body, serving.prompter.writes_calls)
    rule = tools.rule or find_constraint(body.response_format, body.outputs)
    check_size((message.text for message in body.messages), engine, config, "messages")
    with ExitStack() as stack:
        stack.enter_context(serving.admission.enter(client_of(request)))
        if rule is not None:
            await serving.rules.check(rule, client_of(request), "tools" if tools.rule else None)
        variables = body.chat_template_kwargs or {}
        prompt = await serving.tokenize(
            partial(serving.prompter.write, body.messages, tools.shown, tools.begin, **variables)
        )
        most = longest_answer(body.most_tokens, len(prompt.ids), engine, config)
        likeliest = (body.top_logprobs or 0) if body.logprobs else None
        options = to_options(body, engine, most, prompt.ends or None, likeliest, prompt.stops)
        request_options = options, rule, key_of(request), config.request_s, served.delta
        live = await start(serving, [EngineRequest(prompt.ids, *request_options)], len(prompt.ids))
        stack.callback(serving.end, live)
        if body.stream:
            events = chat_events(serving, live, body, tools, prompt.begins, begin)
            return EventStream(events, stack.pop_all().close)
        answers = await whole_answers(serving, live, request)
        if answers is None:
            return Response(status_code=GONE)
        choices = [chat_choice(a, tools, prompt.begins, bool(body.logprobs)) for a in answers[0]]
        head = Head("chat.completion", body.model, "chatcmpl")
        return JSONResponse(head.as_json(choices, usage=usage_of(answers)))


@router.post("/v1/completions")
async def complete(body: CompletionRequest, request: Request) -> Response:
    """Answer a text completion request."""
    begin = time.monotonic()
    serving = serving_of(request)
    served = serving.find(body.model, "completions")
    config, engine = serving.config, serving.engine
    check_limits(body, config)
    rule = find_constraint(None, body.outputs)
    check_size((p for p in body.prompts if isinstance(p, str)), engine, config, "prompt")
    with ExitStack() as stack:
        stack.enter_context(serving.admission.enter(client_of(request), len(body.prompts)))
        if rule is not None:
            await serving.rules.check(rule, client_of(request))
        requests, prompt_tokens = [], 0
        for prompt in body.prompts:
            ids = prompt
            if isinstance(prompt, str):
                ids = await serving.tokenize(partial(engine.tokenizer.encode_prompt, prompt))
            most = longest_answer(body.max_tokens or _COMPLETION_TOKENS, len(ids), engine, config)
            options = to_options(body, engine, most, None, body.logprobs)
            request_options = options, rule, key_of(request), config.request_s, served.delta
            requests.append(EngineRequest(prompt, *request_options))
            prompt_tokens += len(ids)
        live = await start(serving, requests, prompt_tokens)
        stack.callback(serving.end, live)
        if body.stream:
            events = text_events(serving, live, body, begin)
            return EventStream(events, stack.pop_all().close)
        answers = await whole_answers(serving, live, request)
        if answers is None:
            return Response(status_code=GONE)
        choices = [
            {
                "index": number * body.count + answer.index,
                "text": answer.text,
                "logprobs": text_logprobs(answer.logprobs or (), 0)
                if body.logprobs is not None
                else None,
                "finish_reason": finish_name(answer.finish_reason),
            }
            for number, completions in enumerate(answers)
            for answer in completions
        ]
        head = Head("text_completion", body.model, "cmpl")
        return JSONResponse(head.as_json(choices, usage=usage_of(answers)))


async def whole_answers(
    serving: Serving, live: LiveRequest, request: Request
) -> list[list[Completion]] | None:
    """Return all answers when they are finished; None if the client has disconnected.

    Raises:
        RequestError: the engine failed, or the server is stopping.
    """
    try:
        answers = await unless_gone(request.receive, live.whole(), live.cancel)
    except GoneError:
        return None
    serving.metrics.note_answers(answers)
    if any(
        answer.finish_reason == "cancelled" for completions in answers for answer in completions
    ):
        raise overloaded("the server is stopping", serving.config.grace_s)
    return answers

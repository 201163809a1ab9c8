"""Routes of chat and text completions, in OpenAI's format."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from bmforge.infer.engine.request import Completion
from bmforge.infer.engine.request import Request as EngineRequest
from bmforge.serve.answers import Head, chat_choice, finish_name, text_logprobs, usage_of
from bmforge.serve.chatting import open_chat, salt_of
from bmforge.serve.events import chat_events, text_events
from bmforge.serve.http_json import GONE, EventStream, StrictRoute
from bmforge.serve.openai_types import ChatRequest, CompletionRequest
from bmforge.serve.running import start, whole_answers
from bmforge.serve.serving import Serving, client_of, key_of, serving_of
from bmforge.serve.writing import (
    check_limits,
    check_size,
    find_constraint,
    longest_answer,
    to_options,
)

__all__ = ["router"]

_COMPLETION_TOKENS = 16  # OpenAI's default for text completions
router = APIRouter(route_class=StrictRoute)


@router.post("/v1/chat/completions")
async def chat(body: ChatRequest, request: Request) -> Response:
    """Answer a chat completion request."""
    chat = await open_chat(body, request)
    if body.stream:
        return EventStream(chat_events(chat), chat.stack.close)
    answers = await chat.answers(request)
    if answers is None:
        return Response(status_code=GONE)
    choices = [chat_choice(answer, chat.message(answer), body) for answer in answers]
    head = Head("chat.completion", body.model, "chatcmpl")
    return JSONResponse(head.as_json(choices, usage=usage_of([answers])))


@router.post("/v1/completions")
async def complete(body: CompletionRequest, request: Request) -> Response:
    """Answer a text completion request."""
    begin = time.monotonic()
    serving = serving_of(request)
    serving.find(body.model, "completions")
    check_limits(body, serving.config)
    rule = find_constraint(None, body.outputs)
    texts = (p for p in body.prompts if isinstance(p, str))
    check_size(texts, serving.engine, serving.config, "prompt")
    with ExitStack() as stack:
        stack.enter_context(serving.admission.enter(client_of(request), len(body.prompts)))
        if rule is not None:
            await serving.rules.check(rule, client_of(request))
        asked, prompt_tokens = await _ask(body, request, serving, rule)
        live = await start(serving, asked, prompt_tokens, begin)
        live.key = key_of(request)
        stack.callback(serving.end, live)
        if body.stream:
            return EventStream(text_events(serving, live, body), stack.pop_all().close)
        answers = await whole_answers(serving, live, request)
    if answers is None:
        return Response(status_code=GONE)
    choices = [
        _text_choice(body, number * body.count + answer.index, answer)
        for number, found in enumerate(answers)
        for answer in found
    ]
    head = Head("text_completion", body.model, "cmpl")
    return JSONResponse(head.as_json(choices, usage=usage_of(answers)))


async def _ask(
    body: CompletionRequest, request: Request, serving: Serving, rule: Any
) -> tuple[list[EngineRequest], int]:
    """Return the engine requests of all prompts, and the number of their tokens."""
    engine, config = serving.engine, serving.config
    asked, prompt_tokens = [], 0
    salt, delta = salt_of(request, body.cache_salt), serving.find(body.model).delta
    for prompt in body.prompts:
        ids = prompt
        if isinstance(prompt, str):
            ids = await serving.tokenize(partial(engine.tokenizer.encode_prompt, prompt))
        most = longest_answer(body.max_tokens or _COMPLETION_TOKENS, len(ids), engine, config)
        options = await serving.tokenize(
            partial(to_options, body, engine, most, None, body.logprobs)
        )
        asked.append(EngineRequest(prompt, options, rule, salt, config.request_s, delta))
        prompt_tokens += len(ids)
    return asked, prompt_tokens


def _text_choice(body: CompletionRequest, index: int, answer: Completion) -> dict[str, Any]:
    logprobs = None
    if body.logprobs is not None:
        logprobs = text_logprobs(answer.logprobs or (), 0)
    return {
        "index": index,
        "text": answer.text,
        "logprobs": logprobs,
        "finish_reason": finish_name(answer.finish_reason),
    }

"""Routes of chat and text completions, in OpenAI's format."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from bmforge.infer.engine.request import Completion
from bmforge.infer.engine.request import Request as EngineRequest
from bmforge.serve.answers import (
    ResponseFields,
    TextLogprobs,
    chat_choice,
    finish_name,
    join_logprobs,
    usage_of,
)
from bmforge.serve.chat_requests import cache_salt_of, open_chat
from bmforge.serve.engine_options import (
    check_limits,
    check_size,
    find_constraint,
    hidden_ids,
    longest_answer,
    to_options,
)
from bmforge.serve.events import chat_events, text_events
from bmforge.serve.http_json import GONE, EventStream, StrictRoute
from bmforge.serve.openai_types import ChatRequest, CompletionRequest
from bmforge.serve.prompt_scores import PromptEcho, read_echo, scored_tokens
from bmforge.serve.request_runner import start, whole_answers
from bmforge.serve.serving import client_of, key_of, serving_of

__all__ = ["router"]

_COMPLETION_TOKENS = 16  # OpenAI's default for text completions
router = APIRouter(route_class=StrictRoute)


@router.post("/v1/chat/completions")
async def chat(body: ChatRequest, request: Request) -> Response:
    """Handle a chat completion request."""
    chat = await open_chat(body, request)
    if body.stream:
        return EventStream(chat_events(chat), chat.stack.close)
    answers = await chat.answers(request)
    if answers is None:
        return Response(status_code=GONE)
    choices = [chat_choice(answer, chat.message(answer), body) for answer in answers]
    head = ResponseFields("chat.completion", body.model, "chatcmpl")
    return JSONResponse(head.as_json(choices, usage=usage_of([answers], chat.span)))


@router.post("/v1/completions")
async def complete(body: CompletionRequest, request: Request) -> Response:
    """Handle a text completion request."""
    begin = time.monotonic()
    serving = serving_of(request)
    served = serving.find(body.model, "completions")
    check_limits(body, serving.config.limits)
    rule = find_constraint(body.response_format, body.outputs)
    texts = (p for p in body.prompts if isinstance(p, str))
    check_size(texts, serving.engine, serving.config.limits, "prompt")
    with ExitStack() as stack:
        stack.enter_context(serving.admit(request, served, len(body.prompts)))
        if rule is not None:
            await serving.rules.check(rule, client_of(request))
        rows = await serving.tokenize(partial(_encode, body, serving.engine.tokenizer))
        engine_requests = await _ask(body, request, served.delta, rule, rows)
        live = await start(serving, engine_requests, sum(map(len, rows)), begin)
        live.key, live.ping_s = key_of(request), body.sse_ping_interval
        stack.callback(serving.end, live)
        if body.stream:
            return EventStream(text_events(serving, live, body), stack.pop_all().close)
        answers = await whole_answers(serving, live, request)
    if answers is None:
        return Response(status_code=GONE)
    if body.max_tokens == 0:  # return only the prompt; the generated token is dropped
        answers = [[replace(row[0], text="", ids=(), logprobs=())] for row in answers]
    tokenizer = serving.engine.tokenizer
    choices = []
    for number, (ids, completions) in enumerate(zip(rows, answers, strict=True)):
        echo = read_echo(body, tokenizer, ids, completions[0])
        choices += [_text_choice(body, number, answer, echo) for answer in completions]
    head = ResponseFields("text_completion", body.model, "cmpl")
    return JSONResponse(head.as_json(choices, usage=usage_of(answers)))


def _encode(body: CompletionRequest, tokenizer: Any) -> list[list[int]]:
    """Return the token ids of all prompts."""
    encode = tokenizer.encode if body.add_special_tokens is False else tokenizer.encode_prompt
    return [encode(prompt) if isinstance(prompt, str) else prompt for prompt in body.prompts]


async def _ask(
    body: CompletionRequest,
    request: Request,
    delta: str | None,
    rule: Any,
    rows: list[list[int]],
) -> list[EngineRequest]:
    """Build the engine requests for all prompts."""
    serving = serving_of(request)
    engine, config = serving.engine, serving.config
    length = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    salt = cache_salt_of(request, body.cache_salt)
    hidden = hidden_ids(body, engine.tokenizer)
    engine_requests = []
    for prompt, ids in zip(body.prompts, rows, strict=True):
        most = longest_answer(max(length, 1), len(ids), engine, config.limits)
        options = await serving.tokenize(
            partial(to_options, body, engine, most, None, body.logprobs)
        )
        options = options.replace(prompt_logprobs=scored_tokens(body))
        text_or_ids = ids if body.add_special_tokens is False else prompt
        engine_requests.append(
            EngineRequest(
                text_or_ids,
                options,
                rule,
                salt,
                config.timeouts.request_s,
                delta,
                hidden_ids=hidden,
            )
        )
    return engine_requests


def _text_choice(
    body: CompletionRequest, number: int, answer: Completion, echo: PromptEcho
) -> dict[str, Any]:
    """Return one choice of a text completion, preceded by the prompt if it is echoed."""
    logprobs, writer = None, TextLogprobs()
    if body.logprobs is not None:
        before = echo.as_logprobs(writer, body.logprobs) if body.echo else None
        logprobs = join_logprobs(before, writer.write(answer.logprobs or ()))
    choice = {
        "index": number * body.count + answer.index,
        "text": echo.text + answer.text,
        "logprobs": logprobs,
        "finish_reason": "length" if body.max_tokens == 0 else finish_name(answer.finish_reason),
    }
    if body.prompt_logprobs is not None:
        choice["prompt_logprobs"] = echo.as_prompt_logprobs(body.prompt_logprobs)
    return choice

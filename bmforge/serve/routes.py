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
from bmforge.serve.answers import (
    Head,
    TextLogprobs,
    chat_choice,
    finish_name,
    join_logprobs,
    usage_of,
)
from bmforge.serve.chatting import open_chat, salt_of
from bmforge.serve.events import chat_events, text_events
from bmforge.serve.http_json import GONE, EventStream, StrictRoute
from bmforge.serve.live import GoneError
from bmforge.serve.openai_types import ChatRequest, CompletionRequest
from bmforge.serve.prompt_scores import PromptEcho, score_rows
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
        rows = await serving.tokenize(partial(_encode, body, serving.engine.tokenizer))
        asked = await _ask(body, request, serving, rule, rows)
        echoes: list[PromptEcho] = []
        if body.echo or body.prompt_logprobs is not None:
            try:
                echoes = await score_rows(body, request, serving, rows)
            except GoneError:
                return Response(status_code=GONE)
        if body.max_tokens == 0:
            return _echo_alone(body, echoes)
        live = await start(serving, asked, sum(map(len, rows)), begin)
        live.key = key_of(request)
        stack.callback(serving.end, live)
        if body.stream:
            return EventStream(text_events(serving, live, body), stack.pop_all().close)
        answers = await whole_answers(serving, live, request)
    if answers is None:
        return Response(status_code=GONE)
    choices = [
        _text_choice(body, number, answer, echoes[number] if echoes else None)
        for number, found in enumerate(answers)
        for answer in found
    ]
    head = Head("text_completion", body.model, "cmpl")
    return JSONResponse(head.as_json(choices, usage=usage_of(answers)))


def _encode(body: CompletionRequest, tokenizer: Any) -> list[list[int]]:
    """Return the token ids of all prompts."""
    encode = tokenizer.encode if body.add_special_tokens is False else tokenizer.encode_prompt
    return [encode(prompt) if isinstance(prompt, str) else prompt for prompt in body.prompts]


async def _ask(
    body: CompletionRequest,
    request: Request,
    serving: Serving,
    rule: Any,
    rows: list[list[int]],
) -> list[EngineRequest]:
    """Return the engine requests of all prompts."""
    engine, config = serving.engine, serving.config
    wanted = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    salt, delta = salt_of(request, body.cache_salt), serving.find(body.model).delta
    asked = []
    for prompt, ids in zip(body.prompts, rows, strict=True):
        most = longest_answer(max(wanted, 1), len(ids), engine, config)
        options = await serving.tokenize(
            partial(to_options, body, engine, most, None, body.logprobs)
        )
        text_or_ids = ids if body.add_special_tokens is False else prompt
        asked.append(EngineRequest(text_or_ids, options, rule, salt, config.request_s, delta))
    return asked


def _text_choice(
    body: CompletionRequest, number: int, answer: Completion, echo: PromptEcho | None
) -> dict[str, Any]:
    """Return a choice of a text completion, with the prompt in front if it is repeated."""
    logprobs, writer = None, TextLogprobs()
    before = echo.as_logprobs(writer) if echo is not None and body.echo else None
    if echo is not None and body.echo and before is None:
        writer.offset = len(echo.text)
    if body.logprobs is not None:
        logprobs = join_logprobs(before, writer.write(answer.logprobs or ()))
    choice = {
        "index": number * body.count + answer.index,
        "text": ("" if echo is None else echo.text) + answer.text,
        "logprobs": logprobs,
        "finish_reason": finish_name(answer.finish_reason),
    }
    if echo is not None and body.prompt_logprobs is not None:
        choice["prompt_logprobs"] = echo.as_prompt_logprobs()
    return choice


def _echo_alone(body: CompletionRequest, echoes: list[PromptEcho]) -> Response:
    """Return the prompts alone, with their scores: ``max_tokens=0``."""
    choices = []
    for number, echo in enumerate(echoes):
        nothing = Completion(0, "", (), (), "length", len(echo.ids), 0)
        choices.append(_text_choice(body, number, nothing, echo))
    tokens = sum(len(echo.ids) for echo in echoes)
    usage = {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}
    head = Head("text_completion", body.model, "cmpl")
    return JSONResponse(head.as_json(choices, usage=usage))

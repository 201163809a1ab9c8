"""Runs chat requests in OpenAI's format and parses the answers' text, reasoning and calls.

All chat protocols (chat completions, responses, Anthropic's messages) share this path.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import Request

from bmforge.infer.engine.reasoning_span import ReasoningSpan
from bmforge.infer.engine.request import Completion, OutputDelta
from bmforge.infer.engine.request import Request as EngineRequest
from bmforge.serve.answers import Reading
from bmforge.serve.conversation import EncodedPrompt
from bmforge.serve.engine_options import (
    check_limits,
    check_size,
    find_constraint,
    hidden_ids,
    longest_answer,
    to_options,
)
from bmforge.serve.errors import RequestError, overload_error
from bmforge.serve.live_requests import LiveRequest
from bmforge.serve.media import fetch_images
from bmforge.serve.openai_types import ChatRequest
from bmforge.serve.parts import JoinedAnswer
from bmforge.serve.request_runner import start, whole_answers
from bmforge.serve.serving import Serving, client_of, key_of, serving_of
from bmforge.serve.thoughts import ThoughtReader
from bmforge.serve.tools import ToolUse, call_starts, find_tools

__all__ = ["RunningChat", "open_chat", "read_prompt", "received_pieces", "cache_salt_of"]

_MANY_MESSAGES = 100


@dataclass
class RunningChat:
    """A running chat request.

    Args:
        serving: server state.
        live: running engine request.
        tools: tools that may be called.
        prompt: prompt of the conversation.
        span: delimiters of the reasoning; None if it is not separated.
        stack: context managers of the request's resources, which are closed when it ends.
        body: request.
    """

    serving: Serving
    live: LiveRequest
    tools: ToolUse
    prompt: EncodedPrompt
    span: ReasoningSpan | None
    stack: ExitStack
    body: ChatRequest

    def reading(self) -> Reading:
        """Return a new parser for the text of one answer."""
        thoughts, marks = None, self.prompt.thought_marks
        if marks is not None and self.tools.rule is None:
            thoughts = ThoughtReader(marks, self.prompt.is_thinking)
        return Reading(self.tools, self.prompt.begins, thoughts)

    def message(self, answer: Completion) -> JoinedAnswer:
        """Parse a complete answer into text, reasoning and tool calls."""
        reading = self.reading()
        joined = JoinedAnswer.join([*reading.feed(answer.text), *reading.end()])
        return replace(joined, has_calls=reading.has_calls)

    def pieces(self) -> AsyncIterator[tuple[int, OutputDelta] | None]:
        """Yield the output of the answers as it arrives; see `received_pieces`."""
        return received_pieces(self.serving, self.live)

    async def answers(self, request: Request) -> list[Completion] | None:
        """Return all answers when they are finished; None if the client has disconnected."""
        with self.stack:
            answers = await whole_answers(self.serving, self.live, request)
        return None if answers is None else answers[0]


async def received_pieces(
    serving: Serving, live: LiveRequest
) -> AsyncIterator[tuple[int, OutputDelta] | None]:
    """Yield (prompt index, `OutputDelta`) as output arrives; count the tokens at the end.

    Raises:
        RequestError: the engine failed, or the server is stopping.
    """
    async for item in live.pieces():
        if item is not None and item[1].finish_reason == "cancelled":
            raise overload_error("the server is stopping.", serving.config.timeouts.grace_s)
        yield item
    serving.metrics.note_answers(live.completions(), live.key)


async def open_chat(body: ChatRequest, request: Request) -> RunningChat:
    """Admit a chat request, build its prompt, and start generating its answers.

    Raises:
        RequestError: the request is invalid, or the server is overloaded.
    """
    begin, serving = time.monotonic(), serving_of(request)
    served, config, engine = serving.find(body.model, "chat"), serving.config, serving.engine
    tools = await _check(body, serving)
    rule = tools.rule or find_constraint(body.response_format, body.outputs)
    with ExitStack() as stack:
        stack.enter_context(serving.admit(request, served))
        if rule is not None:
            await serving.rules.check(rule, client_of(request), "tools" if tools.rule else None)
            # An optional tool call replaces the text that the constraint applies to.
            rule = replace(rule, free_after=call_starts(tools, engine.tokenizer))
        prompt = await _write_prompt(body, tools, serving)
        most = longest_answer(body.most_tokens, len(prompt.ids), engine, config.limits)
        top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        options = await serving.tokenize(
            partial(to_options, body, engine, most, prompt.ends or None, top_logprobs, prompt.stops)
        )
        salt = cache_salt_of(request, body.cache_salt)
        span = find_span(body, prompt, engine.tokenizer)
        # A required tool call has no reasoning; other constraints apply to the text after it.
        is_apart = rule is not None and not prompt.has_thought
        is_limited = span is not None and span.max_tokens is not None
        thoughts = span if (is_apart or is_limited) and tools.rule is None else None
        form = tools.form
        marks = (*(prompt.thought_marks or ()), *((*form.open, form.close) if form else ()))
        hidden = hidden_ids(body, engine.tokenizer, marks)
        limits = salt, config.timeouts.request_s, served.delta, thoughts, hidden
        engine_request = EngineRequest(prompt.ids, options, rule, *limits, prompt.inputs)
        live = await start(serving, [engine_request], len(prompt.ids), begin)
        live.key, live.ping_s = key_of(request), body.sse_ping_interval
        stack.callback(serving.end, live)
        return RunningChat(serving, live, tools, prompt, span, stack.pop_all(), body)


async def read_prompt(body: ChatRequest, request: Request) -> EncodedPrompt:
    """Build the prompt of a chat request without generating an answer."""
    serving = serving_of(request)
    served = serving.find(body.model, "chat")
    tools = await _check(body, serving)
    with serving.admit(request, served):
        return await _write_prompt(body, tools, serving)


async def _write_prompt(body: ChatRequest, tools: ToolUse, serving: Serving) -> EncodedPrompt:
    """Build the prompt of a chat request; images at allowed URLs are fetched first."""
    if serving.prompter.processor is not None:  # models of text refuse images without fetching them
        body = await fetch_images(body, serving.media)
    return await serving.tokenize(partial(serving.prompter.write, body, tools))


def find_span(body: ChatRequest, prompt: EncodedPrompt, tokenizer: Any) -> ReasoningSpan | None:
    """Return the delimiters of an answer's reasoning, with the limit that a request sets.

    Returns None if the reasoning is not separated from the text.

    Raises:
        RequestError: the model does not reason, so that the limit would have no effect.
    """
    most, marks = body.thinking_token_budget, prompt.thought_marks
    most = None if most == -1 else most
    if marks is not None:
        start, end = (tuple(tokenizer.encode_chat(mark)) for mark in marks)
        return ReasoningSpan(end, () if prompt.is_thinking else start, most)
    if most is not None:
        raise RequestError(
            (
                "thinking_token_budget has no effect, because the chat template of this model has "
                "no reasoning. Leave it out."
            ),
            "thinking_token_budget",
            code="unsupported_value",
        )
    return None


async def _check(body: ChatRequest, serving: Serving) -> ToolUse:
    """Check the limits that can be checked before tokenizing; return the request's tool settings.

    A long conversation is checked in a thread: 3,000 messages take 4 to 10 ms.
    """
    if len(body.messages) <= _MANY_MESSAGES:
        return _check_all(body, serving)
    return await serving.parse(partial(_check_all, body, serving))


def _check_all(body: ChatRequest, serving: Serving) -> ToolUse:
    check_limits(body, serving.config.limits)
    tools = find_tools(body, serving.prompter.tool_format)
    texts = (message.text for message in body.messages)
    check_size(texts, serving.engine, serving.config.limits, "messages")
    return tools


def cache_salt_of(request: Request, salt: str | None) -> str:
    """Return the salt for the prefix cache, from the API key's name and the request's salt."""
    return key_of(request) if not salt else f"{key_of(request)}:{salt}"

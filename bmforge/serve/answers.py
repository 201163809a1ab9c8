"""Builds responses in OpenAI's format from the engine's completions."""

from __future__ import annotations

import codecs
import json
import secrets
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from bmforge.infer.engine.reasoning_span import ReasoningSpan
from bmforge.infer.engine.request import Completion, TokenLogprob
from bmforge.serve.call_reader import CallReader, JsonCallReader
from bmforge.serve.openai_types import ChatRequest
from bmforge.serve.parts import CallPiece, CallStart, JoinedAnswer, Part
from bmforge.serve.thoughts import ThoughtReader
from bmforge.serve.tools import ToolUse

__all__ = [
    "DONE",
    "ResponseFields",
    "Reading",
    "TextLogprobs",
    "chat_choice",
    "chat_finish",
    "chat_logprobs",
    "encode_event",
    "finish_name",
    "join_logprobs",
    "usage_of",
]

DONE = b"data: [DONE]\n\n"
_LEAST = -9999.0  # JSON cannot represent -inf
# An answer that was cut by a deadline or a stopping server is reported as cut by the length limit.
_FINISHES = {"stop": "stop", "length": "length", "deadline": "length", "cancelled": "length"}


def encode_event(value: Any, name: str = "") -> bytes:
    """Encode one server-sent event, with an event name if the protocol uses names."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    named = f"event: {name}\n" if name else ""
    return f"{named}data: {text}\n\n".encode("utf-8", "replace")


def finish_name(reason: str) -> str:
    """Convert the engine's finish reason to OpenAI's."""
    return _FINISHES[reason]


@dataclass(frozen=True)
class ResponseFields:
    """Fields that all chunks of one response have in common.

    Args:
        object: type of the response object.
        model: name of the model.
        prefix: prefix of the response's id.
    """

    object: str
    model: str
    prefix: str
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def as_json(self, choices: Sequence[Any], **more: Any) -> dict[str, Any]:
        """Return a JSON response object, either the complete response or one chunk."""
        return {
            "id": f"{self.prefix}-{self.id}",
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "choices": list(choices),
            **more,
        }


def usage_of(
    completions: Sequence[Sequence[Completion]], span: ReasoningSpan | None = None
) -> dict[str, Any]:
    """Return the token usage of a request; a prompt counts only once for several answers.

    Args:
        completions: answers per prompt.
        span: delimiters of the reasoning, to count its tokens; None if it is not separated.
    """
    prompt = sum(answers[0].prompt_tokens for answers in completions)
    cached = sum(answers[0].cached_tokens for answers in completions)
    new = sum(len(answer.ids) for answers in completions for answer in answers)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if span is not None:
        thoughts = sum(span.count(answer.ids) for answers in completions for answer in answers)
        usage["completion_tokens_details"] = {"reasoning_tokens": thoughts}
    return usage


class Reading:
    """Streaming parser of one answer: separates reasoning, visible text and tool calls.

    Args:
        tools: tools that may be called.
        begins: prefix of the answer that the client does not receive, such as a sentinel token.
        thoughts: parser of the reasoning at the start; None if reasoning is not separated.
    """

    def __init__(
        self, tools: ToolUse, begins: str = "", thoughts: ThoughtReader | None = None
    ) -> None:
        self._begins, self._start = begins, ""
        self._max_calls, self._count = tools.max_calls, 0
        self._thoughts = thoughts
        self._is_over, self._is_after_call = False, False
        self._calls: CallReader | JsonCallReader | None = None
        if tools.rule is not None:
            self._calls = JsonCallReader(tools.schemas)
        elif tools.form is not None:
            self._calls = CallReader(tools.form, tools.schemas)

    @property
    def has_calls(self) -> bool:
        """True if the answer has tool calls, and the last one is not cut."""
        return self._count > 0 and not self.is_cut

    @property
    def is_cut(self) -> bool:
        """True if the answer ends within the arguments of a tool call, such as at a stop string."""
        return self._calls is not None and self._calls.is_cut and not self._is_over

    def feed(self, text: str) -> Iterator[Part]:
        """Process the next text; yield the text, reasoning and tool calls that are now complete."""
        text = self._skip(text)
        if text:
            yield from self._limit(self._read(text))

    def end(self) -> Iterator[Part]:
        """Yield the remaining buffered text when the response ends."""
        yield from self._limit(self._read_end())

    def _read(self, text: str) -> Iterator[Part]:
        for part in (text,) if self._thoughts is None else self._thoughts.feed(text):
            if isinstance(part, str) and self._calls is not None:
                yield from self._calls.feed(part)
            else:
                yield part

    def _read_end(self) -> Iterator[Part]:
        if self._begins and self._start:
            yield from self._read(self._start)
        for part in () if self._thoughts is None else self._thoughts.end():
            if isinstance(part, str) and self._calls is not None:
                yield from self._calls.feed(part)
            else:
                yield part
        if self._calls is not None:
            yield from self._calls.end()

    def _limit(self, parts: Iterator[Part]) -> Iterator[Part]:
        """Yield the parts of the answer, up to the client's maximum number of tool calls.

        Whitespace after a call is left out.
        """
        for part in parts:
            if self._count == self._max_calls and not isinstance(part, CallPiece):
                self._is_over = True
            if self._is_over:
                continue
            self._count += isinstance(part, CallStart)
            shown = part.lstrip() if self._is_after_call and isinstance(part, str) else part
            if shown != "":
                self._is_after_call = isinstance(shown, CallStart | CallPiece)
                yield shown

    def _skip(self, text: str) -> str:
        """Remove the start of an answer that is not sent to the client (`begins`)."""
        if not self._begins:
            return text
        self._start += text
        if len(self._start) < len(self._begins) and self._begins.startswith(self._start):
            return ""
        text, self._begins = self._start.removeprefix(self._begins), ""
        return text


def chat_choice(answer: Completion, message: JoinedAnswer, body: ChatRequest) -> dict[str, Any]:
    """Return one choice of a chat completion.

    Args:
        answer: completion of the engine.
        message: text, reasoning and tool calls parsed from the answer.
        body: request body.
    """
    shown: dict[str, Any] = {"role": "assistant", "content": message.text, "refusal": None}
    if message.thoughts and body.include_reasoning is not False:
        shown["reasoning_content"] = message.thoughts
    if message.calls:
        calls = [call.as_json() for call in message.calls]
        shown |= {"content": message.text or None, "tool_calls": calls}
    return {
        "index": answer.index,
        "message": shown,
        "logprobs": chat_logprobs(answer.logprobs or ()) if body.logprobs else None,
        "finish_reason": chat_finish(answer.finish_reason, message.has_calls),
    }


def chat_finish(reason: str, has_calls: bool) -> str:
    """Return the finish reason of a chat; "tool_calls" only if the calls are complete."""
    name = finish_name(reason)
    return "tool_calls" if has_calls and name == "stop" else name


def chat_logprobs(tokens: Collection[TokenLogprob]) -> dict[str, Any]:
    """Return token log-probabilities in the chat format."""

    def describe(token: TokenLogprob) -> dict[str, Any]:
        return {
            "token": token.data.decode("utf-8", "replace"),
            "logprob": max(token.logprob, _LEAST),
            "bytes": list(token.data),
        }

    content = [
        {**describe(token), "top_logprobs": [describe(top) for top in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


class TextLogprobs:
    """Converts the log-probabilities of one answer to the completions format.

    Attributes:
        offset: number of characters in the tokens converted so far.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.offset = 0

    def write(self, tokens: Collection[TokenLogprob]) -> dict[str, Any]:
        """Return the log-probabilities of the next tokens in the completions format."""
        offsets = []
        for token in tokens:
            offsets.append(self.offset)  # also for a token with part of a character
            self.offset += len(self._decoder.decode(token.data))
        return {
            "tokens": [_spell_token(token) for token in tokens],
            "token_logprobs": [max(token.logprob, _LEAST) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": offsets,
        }

    @staticmethod
    def _top(token: TokenLogprob) -> dict[str, float]:
        """Return a dict from the text of each top token to its log-probability.

        Of several tokens with the same text, the highest log-probability is used.
        """
        collected: dict[str, float] = {}
        for top in token.top:
            collected.setdefault(_spell_token(top), max(top.logprob, _LEAST))
        return collected

    def write_prompt(self, first: bytes, tokens: Collection[TokenLogprob]) -> dict[str, Any]:
        """Return a prompt's log-probabilities in the completions format (first token: None)."""
        start = self.write([TokenLogprob(0, 0.0, first)])
        later = self.write(tokens)
        start |= {"token_logprobs": [None], "top_logprobs": [None]}
        return {name: [*start[name], *later[name]] for name in later}


def _spell_token(token: TokenLogprob) -> str:
    """Return the text of a token; incomplete UTF-8 is written as bytes, as OpenAI does."""
    try:
        return token.data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)


def join_logprobs(*parts: dict[str, Any] | None) -> dict[str, Any] | None:
    """Concatenate log-probabilities in the completions format; None if there are none."""
    collected = [part for part in parts if part is not None]
    if not collected:
        return None
    return {name: [item for part in collected for item in part[name]] for name in collected[0]}

"""What is asked of an engine that serves many, and what it hands back while it answers.

`Engine.submit` takes a `Request` and returns a `Handle`, which any thread may read.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bmforge.errors import ConfigError
from bmforge.infer.engine.constraint import Constraint
from bmforge.infer.options import GenerationConfig
from bmforge.logging import get_logger
from bmforge.tune.delta.selection import DeltaChoice

__all__ = [
    "Completion",
    "FinishReason",
    "Handle",
    "Piece",
    "Request",
    "RequestsConfig",
    "RequestsStatus",
    "TokenLogprob",
]

FinishReason = Literal["stop", "length", "cancelled", "deadline"]


@dataclass(frozen=True)
class Request:
    """One prompt and how to go on with it.

    Args:
        prompt: a text, or ids of the model's tokenizer.
        options: how to continue; `num_return_sequences` answers are written side by side. An end
            token that is not named is the tokenizer's.
        constraint: what every answer must be a case of; see `Constraint`.
        salt: prompts that begin alike share what was computed for them under one salt only, so that
            nobody learns from the time of an answer what others have asked.
        deadline_s: seconds from now on after which what is there must do.
        delta: name of a delta of the model, or several, that answer; () is the model without any,
            None as the model is.
    """

    prompt: str | Sequence[int]
    options: GenerationConfig = field(default_factory=GenerationConfig)
    constraint: Constraint | None = None
    salt: str = ""
    deadline_s: float | None = None
    delta: DeltaChoice = None

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a deadline that has passed."""
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise ConfigError(
                f"deadline_s={self.deadline_s} must be above 0, or None for as long as it takes."
            )


@dataclass(frozen=True)
class TokenLogprob:
    """A token that was written and how likely it was.

    Args:
        id: of the token.
        logprob: logarithm of its probability by the model's own scores, before any option.
        data: what it stands for, in UTF-8; part of a character may be alone in a token.
        top: the likeliest tokens in its place, the likeliest first.
    """

    id: int
    logprob: float
    data: bytes
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Piece:
    """What was written since the piece before.

    Args:
        index: of which answer.
        text: whole characters that no stop string can take back any more.
        ids: the tokens that were chosen; their text may come with a later piece.
        logprobs: of these tokens, where they were asked for.
        finish_reason: why the answer ended, in its last piece.
    """

    index: int
    text: str
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class Completion:
    """A whole answer.

    Args:
        index: of which one.
        text: of it, without what stopped it.
        ids: all tokens that were chosen, an end token included.
        logprobs: of each, where they were asked for.
        finish_reason: why it ended.
        prompt_tokens: tokens of the prompt.
        cached_tokens: those of them that were not computed, as an earlier prompt began alike.
    """

    index: int
    text: str
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, kw_only=True)
class RequestsConfig:
    """Limits of an engine's batched requests.

    Args:
        max_num_seqs: maximum number of answers in a batch; more wait.
        max_queue_size: maximum number of waiting requests; more are refused.
        max_num_batched_tokens: maximum number of tokens in a step. A longer prompt is read in
            several steps, next to which the other answers go on.
        total_tokens: capacity of the KV cache in tokens (default: 16 times the longest row; with a
            budget `max_rows` times `max_tokens`).
        enable_prefix_caching: keep the keys and values of prompts, while there is room, for prompts
            with the same beginning.
        speculates: speculative decoding with draft tokens from n-grams of the text so far.
        draft: draft model of speculative decoding with the same vocabulary: a directory, hub id,
            short name or model. It stays in memory, within the budget.
        kv_cache_dtype: dtype of keys and values (default: the model's); int8 stores a scale per
            token and head.
    """

    max_num_seqs: int = 16
    max_queue_size: int = 1024
    max_num_batched_tokens: int = 128
    total_tokens: int | None = None
    enable_prefix_caching: bool = True
    speculates: bool = False
    draft: Any = None
    kv_cache_dtype: Literal["fp32", "bf16", "fp16", "int8"] | None = None

    def __post_init__(self) -> None:
        """Raise `ConfigError` for numbers out of range."""
        for name in ("max_num_seqs", "max_queue_size", "max_num_batched_tokens", "total_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"RequestsConfig: {name}={value} must be at least 1.")
        if self.kv_cache_dtype not in (None, "fp32", "bf16", "fp16", "int8"):
            raise ConfigError(
                f"RequestsConfig: kv_cache_dtype={self.kv_cache_dtype!r} must be fp32, bf16, fp16 "
                "or int8, or None for the model's."
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"RequestsConfig: max_num_batched_tokens={self.max_num_batched_tokens} is below "
                f"max_num_seqs={self.max_num_seqs}, so some answers would get no token. Give at "
                "least as many."
            )


@dataclass(frozen=True)
class RequestsStatus:
    """How busy an engine is.

    Args:
        running: answers that are written now.
        waiting: those that wait for room.
        pages_used: pages of keys and values that answers need.
        pages_free: all others, those that keep prefixes among them.
    """

    running: int
    waiting: int
    pages_used: int
    pages_free: int


class Handle:
    """A request that was taken: iterate it for its pieces, or wait for the whole answers.

    Any thread may read it; the engine writes into it.

    Args:
        answers: how many there will be.
    """

    def __init__(self, answers: int = 1) -> None:
        self._answers = answers
        self._changed = threading.Condition()
        self._pieces: deque[Piece] = deque()
        self._whole: dict[int, Completion] = {}
        self._error: Exception | None = None
        self._watch: Callable[[], object] | None = None
        self._is_cancelled = False

    @property
    def done(self) -> bool:
        """Whether every answer has ended, or the request failed."""
        return self._error is not None or len(self._whole) == self._answers

    @property
    def is_cancelled(self) -> bool:
        """Whether somebody has cancelled it."""
        return self._is_cancelled

    @property
    def unread(self) -> int:
        """Pieces that nobody has taken yet."""
        return len(self._pieces)

    def cancel(self) -> None:
        """End it before the next step; its answers are what is there, with reason "cancelled"."""
        self._is_cancelled = True

    def watch(self, call: Callable[[], object]) -> None:
        """Have `call` called, by the engine's thread, whenever there is something to `take`.

        It must return at once; what it raises ends the request.
        """
        with self._changed:
            self._watch = call
            is_late = bool(self._pieces) or self.done
        if is_late:
            call()

    def take(self) -> list[Piece]:
        """Return what is there without waiting.

        Raises:
            Exception: what the engine failed with, once all pieces before were taken.
        """
        with self._changed:
            found = list(self._pieces)
            self._pieces.clear()
            if not found and self._error is not None:
                raise self._error
            return found

    def __iter__(self) -> Iterator[Piece]:
        """Yield pieces as they are written, until every answer has ended."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pieces or self.done)
            found = self.take()
            if not found:
                return
            yield from found

    def wait(self, timeout_s: float | None = None) -> list[Completion]:
        """Return all answers, when they have ended.

        Raises:
            TimeoutError: they have not after `timeout_s`; the request goes on.
            Exception: what the engine failed with.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.done, timeout_s):
                raise TimeoutError(f"the request has not ended after timeout_s={timeout_s}.")
            if self._error is not None:
                raise self._error
            return [self._whole[index] for index in range(self._answers)]

    def put(self, piece: Piece, whole: Completion | None = None) -> None:
        """Add a piece, and with an answer's last one all of it; the engine calls this."""
        with self._changed:
            self._pieces.append(piece)
            if whole is not None:
                self._whole[whole.index] = whole
            self._changed.notify_all()
        self._tell()

    def fail(self, error: Exception) -> None:
        """End it with an error; the engine calls this.

        Who watches is told once more and then left: what that raises is logged, as nobody else's
        request may end by it.
        """
        with self._changed:
            if not self.done:
                self._error = error
            watch, self._watch = self._watch, None
            self._changed.notify_all()
        try:
            if watch is not None:
                watch()
        except Exception as raised:
            get_logger().warning("engine: what watches a request raised %r", raised)

    def _tell(self) -> None:
        if self._watch is not None:
            self._watch()

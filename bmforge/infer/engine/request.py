"""Public types of batched requests: `Request`, `Handle`, `OutputDelta`, `Completion`, limits.

`Engine.submit` takes a `Request` and returns a `Handle`, which any thread may read.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from bmforge.errors import ConfigError
from bmforge.infer.engine.constraint import Constraint
from bmforge.infer.engine.reasoning_span import ReasoningSpan
from bmforge.infer.options import GenerationConfig
from bmforge.logging import get_logger
from bmforge.tune.delta.selection import DeltaChoice

__all__ = [
    "Completion",
    "FinishReason",
    "Handle",
    "OutputDelta",
    "Request",
    "RequestsConfig",
    "RequestsStatus",
    "TokenLogprob",
]

FinishReason = Literal["stop", "length", "cancelled", "deadline"]


@dataclass(frozen=True)
class Request:
    """Prompt with its generation options.

    Args:
        prompt: text or token ids.
        options: generation options; `num_return_sequences` answers are generated in parallel.
            The default EOS token is the tokenizer's.
        constraint: constraint on every answer; see `Constraint`.
        cache_salt: salt of the prefix cache; only prompts with the same salt share cached prefixes,
            so that response times do not reveal the prompts of others.
        deadline_s: deadline in seconds from now, after which unfinished answers end.
        delta: adapter name or names; () for the base model; None for the model's active adapters.
        thoughts: span of the reasoning at the start of every answer, with its limit; a constraint
            applies to the text after the reasoning. If None, the reasoning has no limit, and a
            constraint applies from the first token.
        hidden_ids: tokens whose text is omitted from the answers, as is that of EOS tokens; None
            means the tokenizer's begin, end and padding tokens.
        inputs: further inputs of the model for the prompt, as in `generate`.
    """

    prompt: str | Sequence[int]
    options: GenerationConfig = field(default_factory=GenerationConfig)
    constraint: Constraint | None = None
    cache_salt: str = ""
    deadline_s: float | None = None
    delta: DeltaChoice = None
    thoughts: ReasoningSpan | None = None
    hidden_ids: tuple[int, ...] | None = None
    inputs: Mapping[str, Tensor] | None = None

    def __post_init__(self) -> None:
        """Raise `ConfigError` if the deadline is not positive."""
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise ConfigError(
                f"deadline_s={self.deadline_s} must be above 0, or None for no limit."
            )


@dataclass(frozen=True)
class TokenLogprob:
    """A token and its log-probability.

    Args:
        id: token id.
        logprob: log-probability, as defined by `GenerationConfig.logprobs_mode`.
        data: UTF-8 bytes of the token, possibly an incomplete character.
        top: most likely tokens at the same position, best first.
        rank: rank of a prompt token among all tokens at its position, from 1; None if not counted.
    """

    id: int
    logprob: float
    data: bytes
    top: tuple[TokenLogprob, ...] = ()
    rank: int | None = None


@dataclass(frozen=True)
class OutputDelta:
    """Output of one answer since its previous `OutputDelta`.

    Args:
        index: index of the answer.
        text: complete characters that no later stop string can remove.
        ids: generated tokens; their text may follow in a later delta.
        logprobs: log-probabilities of the tokens if requested.
        finish_reason: reason why the answer ended; None before the last delta.
    """

    index: int
    text: str
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class Completion:
    """Complete answer.

    Args:
        index: index of the answer.
        text: text without the stop string.
        ids: generated tokens, including the EOS token.
        logprobs: log-probabilities of the tokens if requested.
        finish_reason: reason why the answer ended.
        prompt_tokens: number of prompt tokens.
        cached_tokens: number of prompt tokens found in the prefix cache.
        weights_version: `Engine.weights_version` when the first token was chosen.
        prompt_logprobs: log-probabilities of the prompt tokens if requested, in the first answer;
            None for the first token and for the tokens of a soft prompt, which have none.
    """

    index: int
    text: str
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    weights_version: int = 0
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class RequestsConfig:
    """Limits of an engine's batched requests.

    Args:
        max_num_seqs: maximum number of answers in a batch; further answers wait.
        max_queue_size: maximum number of waiting requests; further requests raise an error.
        max_num_batched_tokens: maximum number of tokens in a step. A longer prompt is processed
            in several steps (chunked prefill), together with other answers.
        total_tokens: capacity of the KV cache in tokens (default: 16 times the maximum sequence
            length; with a budget `max_rows` times `max_tokens`).
        enable_prefix_caching: keep keys and values of prompts, while memory allows, and reuse
            them for prompts with the same beginning.
        use_speculation: use speculative decoding with draft tokens from n-grams of the text so far.
        draft: draft model for speculative decoding, with the same vocabulary: a directory, hub
            id, short name or model. It is resident and counts towards the budget.
        kv_cache_dtype: dtype of keys and values (default: the model's); int8 also stores a
            scale per token and head.
    """

    max_num_seqs: int = 16
    max_queue_size: int = 1024
    max_num_batched_tokens: int = 128
    total_tokens: int | None = None
    enable_prefix_caching: bool = True
    use_speculation: bool = False
    draft: Any = None
    kv_cache_dtype: Literal["fp32", "bf16", "fp16", "int8"] | None = None

    def __post_init__(self) -> None:
        """Raise `ConfigError` for values out of range."""
        for name in ("max_num_seqs", "max_queue_size", "max_num_batched_tokens", "total_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"RequestsConfig: {name}={value} must be at least 1.")
        if self.kv_cache_dtype not in (None, "fp32", "bf16", "fp16", "int8"):
            raise ConfigError(
                f"RequestsConfig: kv_cache_dtype={self.kv_cache_dtype!r} must be fp32, bf16, "
                "fp16 or int8, or None for the model's dtype."
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"RequestsConfig: max_num_batched_tokens={self.max_num_batched_tokens} is below "
                f"max_num_seqs={self.max_num_seqs}, so some answers would never be continued. "
                "Set max_num_batched_tokens to at least max_num_seqs."
            )


@dataclass(frozen=True)
class RequestsStatus:
    """Load of an engine: numbers of answers to generate, and of KV cache pages.

    Args:
        running: number of answers that are being generated.
        waiting: number of queued answers.
        pages_used: number of KV cache pages in use.
        pages_free: number of pages not in use, including cached prefixes.
    """

    running: int
    waiting: int
    pages_used: int
    pages_free: int


class Handle:
    """Handle of a queued request: iterate over its `OutputDelta`s, or wait for complete answers.

    Any thread may read from a handle; only the engine writes to it.

    Args:
        answers: number of answers.

    Attributes:
        started_s: time of the request's first step on the monotonic clock; None before the
            first step.
    """

    def __init__(self, answers: int = 1) -> None:
        self._answers = answers
        self._changed = threading.Condition()
        self._pieces: deque[OutputDelta] = deque()
        self._whole: dict[int, Completion] = {}
        self._error: Exception | None = None
        self._watch: Callable[[], object] | None = None
        self._is_cancelled = False
        self.started_s: float | None = None

    def note_start(self, now_s: float) -> None:
        """Record the time of the request's first step; called by the engine."""
        if self.started_s is None:
            self.started_s = now_s

    @property
    def done(self) -> bool:
        """Whether every answer has ended, or the request failed."""
        return self._error is not None or len(self._whole) == self._answers

    @property
    def is_cancelled(self) -> bool:
        """Whether the request was cancelled."""
        return self._is_cancelled

    @property
    def unread(self) -> int:
        """Number of deltas that have not been read yet."""
        return len(self._pieces)

    def cancel(self) -> None:
        """Cancel the request; unfinished answers end as "cancelled" before the next step."""
        self._is_cancelled = True

    def watch(self, call: Callable[[], object]) -> None:
        """Register a callback, which the engine's thread calls whenever `take` has new output.

        The callback must return at once; its exceptions end the request.
        """
        with self._changed:
            self._watch = call
            is_late = bool(self._pieces) or self.done
        if is_late:
            call()

    def take(self) -> list[OutputDelta]:
        """Return the unread deltas without waiting.

        Raises:
            Exception: the request failed, and all deltas before the failure have been read.
        """
        with self._changed:
            pieces = list(self._pieces)
            self._pieces.clear()
            if not pieces and self._error is not None:
                raise self._error
            return pieces

    def __iter__(self) -> Iterator[OutputDelta]:
        """Yield deltas as they arrive, until all answers have ended."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pieces or self.done)
            pieces = self.take()
            if not pieces:
                return
            yield from pieces

    def wait(self, timeout_s: float | None = None) -> list[Completion]:
        """Wait until all answers have ended, and return them.

        Raises:
            TimeoutError: an answer has not ended after `timeout_s`; the request continues.
            Exception: the request failed.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.done, timeout_s):
                raise TimeoutError(
                    f"the request has not ended after timeout_s={timeout_s}. Wait with a larger "
                    "timeout_s, or cancel the request."
                )
            if self._error is not None:
                raise self._error
            return [self._whole[index] for index in range(self._answers)]

    def put(self, piece: OutputDelta, completion: Completion | None = None) -> None:
        """Add a delta, and an answer's `Completion` with its last delta; called by the engine."""
        with self._changed:
            self._pieces.append(piece)
            if completion is not None:
                self._whole[completion.index] = completion
            self._changed.notify_all()
        self._tell()

    def fail(self, error: Exception) -> None:
        """Fail the request with an error; called by the engine.

        The callback of `watch` is called once more. Its exceptions are logged, so that they do not
        end other requests.
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
            get_logger().warning("the callback of an engine request raised %r", raised)

    def _tell(self) -> None:
        if self._watch is not None:
            self._watch()

"""State of one answer during generation: chosen tokens, incremental text, finish reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bmforge.infer.engine.batch_choice import Draw, TokenChoice, narrow_sampled
from bmforge.infer.engine.constraint import Matcher
from bmforge.infer.engine.reasoning_span import MatcherAfterReasoning, ReasoningSpan
from bmforge.infer.engine.request import Completion, FinishReason, OutputDelta, TokenLogprob
from bmforge.infer.engine.text_stream import TextStream, token_data
from bmforge.infer.options import GenerationConfig
from bmforge.infer.sampling import (
    check_scores,
    draw_number,
    draw_token,
    process_scores,
)

__all__ = ["Answer", "Vocabulary"]

# Options whose effect depends on the tokens so far.
_OF_ROWS = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "begin_suppress_tokens",
)


class Vocabulary:
    """Maps token ids to bytes.

    Args:
        tokenizer: the model's tokenizer; None if no text is decoded.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._tokens: dict[int, str] | None = None

    def data(self, id: int) -> bytes:
        """Return the bytes of a token; empty for an unknown id."""
        if self._tokens is None:
            vocabulary = {} if self.tokenizer is None else self.tokenizer.get_vocab()
            self._tokens = {id: token for token, id in vocabulary.items()}
        token = self._tokens.get(id)
        return b"" if token is None else token_data(self.tokenizer, token, id)

    def stream(
        self, stops: Sequence[str], hidden: Sequence[int], before: Sequence[int]
    ) -> TextStream:
        """Create the incremental detokenizer of one answer; see `TextStream` for the arguments."""
        return TextStream(self.tokenizer or _NoText(), stops, hidden, before)


class _NoText:
    """Replaces the tokenizer of an engine without one; decodes all tokens to empty text."""

    def decode_written(self, ids: Sequence[int]) -> str:
        return ""


class Answer:
    """One answer while it is generated.

    Args:
        index: index of the answer in its request.
        config: generation options, complete with EOS tokens and seed.
        prompt: prompt ids to which repetition penalties apply.
        vocabulary: bytes of the tokens.
        hidden: ids whose text is omitted.
        before: ids of the text before the answer, for detokenization.
        matcher: state of the constraint; None for an unconstrained answer.
        thoughts: span of the reasoning, with its limit; None for no limit.

    Attributes:
        ids: generated tokens.
        finish_reason: reason why the answer ended; None while it is generated.
        cached: number of prompt tokens found in the prefix cache.
        is_delivered: whether the final output of the answer was delivered to the handle.
        weights_version: version of the weights when the first token was chosen.
    """

    def __init__(
        self,
        index: int,
        config: GenerationConfig,
        prompt: Sequence[int],
        vocabulary: Vocabulary,
        hidden: Sequence[int] = (),
        before: Sequence[int] = (),
        matcher: Matcher | MatcherAfterReasoning | None = None,
        thoughts: ReasoningSpan | None = None,
    ) -> None:
        self.index, self.config, self._thoughts = index, config, thoughts
        self.ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.cached, self.is_delivered, self.weights_version = 0, False, 0
        self._prompt, self._vocabulary, self._matcher = list(prompt), vocabulary, matcher
        ends = (*config.eos_tokens, *hidden)
        self._stream = vocabulary.stream(config.stop_strings, ends, before)
        self._looks_back = bool(config.given(*_OF_ROWS))
        is_free = matcher is None and thoughts is None and not self._looks_back
        is_free = is_free and not config.logit_bias
        self._is_plain = is_free and not config.logprobs  # None, or 0: no top tokens
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: dict[int, TokenLogprob] = {}
        self._told = 0  # number of ids in delivered pieces
        self._fresh = ""
        self._allowed = None if matcher is None else matcher.allowed()

    def draw(self, scores: Tensor) -> Draw | None:
        """Return the input of `choose_batch` for the next token.

        Returns None if the choice of the token depends on the text so far.
        """
        if not self._is_plain:
            return None
        config = self.config
        forbidden = config.eos_tokens if len(self.ids) < config.min_new_tokens else ()
        return Draw(config, self._number() if config.do_sample else 0.0, scores, forbidden)

    def choose(self, scores: Tensor, choice: TokenChoice | None = None) -> int | None:
        """Choose the next token, append it to the answer, and return its id.

        Returns None if the constraint allows no further token, which ends the answer.

        `finish_reason` is set if the answer ends after this token.

        Args:
            scores: logits of the next token.
            choice: result of `choose_batch` for these logits; if None, this method chooses.

        Shape:
            scores: (V,) in fp32

        Raises:
            ConfigError: no token is allowed.
        """
        if self._matcher is not None and self._allowed is None:
            self.end("stop")
            return None
        forced = None if self._thoughts is None else self._thoughts.next_token(self.ids)
        if choice is None:
            token, sampled = self._pick(scores)
            token = token if forced is None else forced
            if self.config.logprobs is not None:
                is_raw = self.config.logprobs_mode == "raw_logprobs"
                self._logprobs.append(self._describe(scores if is_raw else sampled, token))
        else:
            token = choice.token
            if choice.logprob is not None:
                data = self._vocabulary.data(token)
                self._logprobs.append(TokenLogprob(token, choice.logprob, data))
        self.ids.append(token)
        if self._matcher is not None:
            self._matcher.take(token)
        if token in self.config.eos_tokens:
            self.end("stop")
            return token
        self._fresh += self._stream.add([token])
        if self._matcher is not None:
            self._allowed = self._matcher.allowed()
        if self._stream.is_stopped or (self._matcher is not None and self._allowed is None):
            self.end("stop")
        elif len(self.ids) == self.config.max_new_tokens:
            self.end("length")
        return token

    def score_prompt(self, start: int, scores: Tensor) -> None:
        """Record the log-probabilities of the prompt tokens after position `start`.

        Args:
            start: position of the prompt token from which the first row of logits was computed.
            scores: logits of consecutive positions.

        Shape:
            scores: (T, V) in fp32
        """
        if self.config.logprobs_mode == "processed_logprobs":
            scores = narrow_sampled(scores, self.config)
        for position, row in enumerate(scores, start + 1):
            if position < len(self._prompt) and self._prompt[position] < len(row):
                token, count = self._prompt[position], self.config.prompt_logprobs or 0
                rank = int((row > row[token]).sum()) + 1
                described = self._describe(row, token, count)
                self._prompt_logprobs[position] = replace(described, rank=rank)

    def _number(self) -> float:
        """Return the random number used to sample the next token."""
        assert self.config.seed is not None
        return draw_number(self.config.seed, self.index, len(self.ids))

    def _pick(self, scores: Tensor) -> tuple[int, Tensor]:
        """Return the next token, and the processed scores from which this token was chosen."""
        config, row = self.config, scores[None]
        seen_ids = torch.tensor([self._known()], dtype=torch.int64, device=scores.device)
        nothing = torch.zeros(1, dtype=torch.int64, device=scores.device)
        row = process_scores(row, seen_ids, len(self.ids), nothing, config)
        if self._allowed is not None:
            count = min(len(self._allowed), row.shape[1])
            barred = torch.ones_like(row, dtype=torch.bool)
            barred[0, :count] = ~self._allowed[:count].to(row.device)
            row = row.masked_fill(barred, -torch.inf)
        check_scores(row)
        row = narrow_sampled(row, config)[0]
        if not config.do_sample:
            return int(row.argmax()), row
        return draw_token(row.softmax(-1), self._number()), row

    def _known(self) -> list[int]:
        """Return the prompt and answer ids if an option depends on them; otherwise []."""
        return [*self._prompt, *self.ids] if self._looks_back else []

    def _describe(self, scores: Tensor, token: int, count: int | None = None) -> TokenLogprob:
        """Return the log-probabilities of a token and of the most likely tokens at its position."""
        logprobs = scores.log_softmax(-1)
        count = self.config.logprobs or 0 if count is None else count
        best = logprobs.topk(min(count, len(logprobs)))
        top = tuple(
            TokenLogprob(id, logprob, self._vocabulary.data(id))
            for id, logprob in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        )
        return TokenLogprob(token, float(logprobs[token]), self._vocabulary.data(token), top)

    def write(self, ids: Sequence[int]) -> None:
        """Set the complete answer, cut after its first EOS token."""
        ends = [index for index, id in enumerate(ids) if id in self.config.eos_tokens]
        self.ids = list(ids[: ends[0] + 1] if ends else ids)
        self._fresh += self._stream.add(self.ids)
        self.end("stop" if ends else "length")

    def write_text(self, text: str) -> None:
        """Set the complete text of the answer."""
        self._stream.text = self._fresh = text
        self.end("stop")

    def end(self, reason: FinishReason) -> None:
        """End the answer; later calls do not change the reason."""
        if self.finish_reason is None:
            self.finish_reason = reason
            self._fresh += self._stream.finish()

    def piece(self) -> OutputDelta | None:
        """Return the output since the previous call; None if there is no new output."""
        ids, tells = tuple(self.ids[self._told :]), self.config.logprobs is not None
        if not ids and not self._fresh and self.finish_reason is None:
            return None
        logprobs = tuple(self._logprobs[self._told :]) if tells else None
        new_piece = OutputDelta(self.index, self._fresh, ids, logprobs, self.finish_reason)
        self._told, self._fresh = len(self.ids), ""
        return new_piece

    def completion(self, prompt_tokens: int) -> Completion:
        """Return the complete answer; call only after generation has finished."""
        assert self.finish_reason is not None
        return Completion(
            index=self.index,
            text=self._stream.text,
            ids=tuple(self.ids),
            logprobs=None if self.config.logprobs is None else tuple(self._logprobs),
            finish_reason=self.finish_reason,
            prompt_tokens=prompt_tokens,
            cached_tokens=self.cached,
            weights_version=self.weights_version,
            prompt_logprobs=self._tell_prompt(),
        )

    def _tell_prompt(self) -> tuple[TokenLogprob | None, ...] | None:
        if self.config.prompt_logprobs is None or self.index:
            return None
        return tuple(self._prompt_logprobs.get(position) for position in range(len(self._prompt)))

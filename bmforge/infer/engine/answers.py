"""One answer while it is written: which token comes next, what can be shown, and why it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bmforge.infer.engine.constraint import Matcher
from bmforge.infer.engine.request import Completion, FinishReason, Piece, TokenLogprob
from bmforge.infer.engine.text_stream import TextStream, token_data
from bmforge.infer.options import GenerationConfig
from bmforge.infer.sampling import (
    check_scores,
    draw_number,
    draw_token,
    narrow_scores,
    process_scores,
)

__all__ = ["Answer", "Vocabulary"]

# Options that look at what is there already.
_OF_ROWS = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
)


class Vocabulary:
    """What tokens stand for, by id.

    Args:
        tokenizer: the model's; None where texts are nobody's business.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._tokens: dict[int, str] | None = None

    def data(self, id: int) -> bytes:
        """Return the bytes of a token; none where the vocabulary has no such id."""
        if self._tokens is None:
            vocabulary = {} if self.tokenizer is None else self.tokenizer.get_vocab()
            self._tokens = {id: token for token, id in vocabulary.items()}
        token = self._tokens.get(id)
        return b"" if token is None else token_data(self.tokenizer, token, id)

    def stream(
        self, stops: Sequence[str], hidden: Sequence[int], before: Sequence[int]
    ) -> TextStream:
        """Return the incremental decoder of one answer; see `TextStream` for the arguments."""
        return TextStream(self.tokenizer or _NoText(), stops, hidden, before)


class _NoText:
    """Stands for the tokenizer of an engine that has none: ids are all there is."""

    def decode_written(self, ids: Sequence[int]) -> str:
        return ""


class Answer:
    """An answer in the middle of being written.

    Args:
        index: of those of its request.
        config: how it is written, end tokens and seed filled in.
        prompt: ids that count as repeated.
        vocabulary: what tokens stand for.
        hidden: ids that stand for no text.
        before: ids of the text that the answer continues.
        matcher: what it must be a case of.

    Attributes:
        ids: the tokens so far.
        finish_reason: why it ended; None while it goes on.
        cached: tokens of the prompt that were not computed.
        is_told: its end was handed over.
    """

    def __init__(
        self,
        index: int,
        config: GenerationConfig,
        prompt: Sequence[int],
        vocabulary: Vocabulary,
        hidden: Sequence[int] = (),
        before: Sequence[int] = (),
        matcher: Matcher | None = None,
    ) -> None:
        self.index, self.config = index, config
        self.ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.cached, self.is_told = 0, False
        self._prompt, self._vocabulary, self._matcher = list(prompt), vocabulary, matcher
        ends = (*config.eos_tokens, *hidden)
        self._stream = vocabulary.stream(config.stop_strings, ends, before)
        self._looks_back = bool(config.given(*_OF_ROWS))
        self._logprobs: list[TokenLogprob] = []
        self._told = 0  # ids that pieces have told
        self._fresh = ""
        self._allowed = None if matcher is None else matcher.allowed()

    def choose(self, scores: Tensor) -> int | None:
        """Choose the next token; None where the answer ends without one.

        Whether it goes on behind the token, `finish_reason` tells.

        Shape:
            scores: (V,) in fp32

        Raises:
            ConfigError: no token is left.
        """
        if self._matcher is not None and self._allowed is None:
            self.end("stop")
            return None
        token = self._pick(scores)
        if self.config.logprobs is not None:
            self._logprobs.append(self._describe(scores, token))
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

    def _pick(self, scores: Tensor) -> int:
        config, row = self.config, scores[None]
        known = torch.tensor([self._known()], dtype=torch.int64, device=scores.device)
        nothing = torch.zeros(1, dtype=torch.int64, device=scores.device)
        row = process_scores(row, known, len(self.ids), nothing, config)
        if self._allowed is not None:
            count = min(len(self._allowed), row.shape[1])
            barred = torch.ones_like(row, dtype=torch.bool)
            barred[0, :count] = ~self._allowed[:count].to(row.device)
            row = row.masked_fill(barred, -torch.inf)
        check_scores(row)
        if not config.do_sample:
            return int(row.argmax())
        probabilities = narrow_scores(row, config)[0].softmax(-1)
        assert config.seed is not None
        return draw_token(probabilities, draw_number(config.seed, self.index, len(self.ids)))

    def _known(self) -> list[int]:
        """Return the row so far, where an option asks for it."""
        return [*self._prompt, *self.ids] if self._looks_back else []

    def _describe(self, scores: Tensor, token: int) -> TokenLogprob:
        """Return how likely a token was, and the likeliest in its place."""
        logprobs = scores.log_softmax(-1)
        best = logprobs.topk(min(self.config.logprobs or 0, len(logprobs)))
        top = tuple(
            TokenLogprob(id, logprob, self._vocabulary.data(id))
            for id, logprob in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        )
        return TokenLogprob(token, float(logprobs[token]), self._vocabulary.data(token), top)

    def write(self, ids: Sequence[int]) -> None:
        """Take a whole answer, which ends with its first end token."""
        ends = [place for place, id in enumerate(ids) if id in self.config.eos_tokens]
        self.ids = list(ids[: ends[0] + 1] if ends else ids)
        self._fresh += self._stream.add(self.ids)
        self.end("stop" if ends else "length")

    def write_text(self, text: str) -> None:
        """Take the text of a whole answer."""
        self._stream.text = self._fresh = text
        self.end("stop")

    def end(self, reason: FinishReason) -> None:
        """End it, for the first reason that comes."""
        if self.finish_reason is None:
            self.finish_reason = reason
            self._fresh += self._stream.finish()

    def piece(self) -> Piece | None:
        """Return what is new since the last one; None where nothing is."""
        ids, tells = tuple(self.ids[self._told :]), self.config.logprobs is not None
        if not ids and not self._fresh and self.finish_reason is None:
            return None
        logprobs = tuple(self._logprobs[self._told :]) if tells else None
        made = Piece(self.index, self._fresh, ids, logprobs, self.finish_reason)
        self._told, self._fresh = len(self.ids), ""
        return made

    def completion(self, prompt_tokens: int) -> Completion:
        """Return all of it, when it has ended."""
        assert self.finish_reason is not None
        return Completion(
            index=self.index,
            text=self._stream.text,
            ids=tuple(self.ids),
            logprobs=None if self.config.logprobs is None else tuple(self._logprobs),
            finish_reason=self.finish_reason,
            prompt_tokens=prompt_tokens,
            cached_tokens=self.cached,
        )

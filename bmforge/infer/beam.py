"""Beam search that reproduces every step of transformers, with the same ids and scores."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bmforge.infer.decoder import Decoder
from bmforge.infer.options import GenerationConfig
from bmforge.infer.sampling import Words, check_scores, is_one_of, process_scores

__all__ = ["beam_search"]

# Below every real score, but finite, so that it can be added and divided.
_WORST = -1.0e9


def beam_search(
    decoder: Decoder,
    prompt: Tensor,
    padding: Tensor,
    config: GenerationConfig,
    words: Sequence[Words] = (),
) -> tuple[Tensor, Tensor]:
    """Return the best continuations of every prompt and their scores, best first.

    Args:
        decoder: new decoder whose cache is empty.
        prompt: token ids.
        padding: number of padding tokens on the left of each prompt.
        config: generation options; `num_return_sequences` continuations are returned per prompt.
        words: token sequences that must not be generated, for each prompt.

    Shape:
        prompt: (B, T); padding: (B,)
        returns (B * num_return_sequences, T + new) and (B * num_return_sequences,)
    """
    beams = _Beams(prompt, config)
    padding = padding.repeat_interleave(config.num_beams)
    scores = decoder.repeat(config.num_beams, decoder.run(prompt))
    while True:
        ids = beams.ids.flatten(0, 1)[:, : beams.length]
        log_probs = scores.log_softmax(-1)
        log_probs = process_scores(log_probs, ids, beams.new_tokens, padding, config, words)
        check_scores(log_probs.unflatten(0, (-1, config.num_beams)).amax(1))
        origin = beams.advance(log_probs)
        if beams.is_done():
            return beams.best(config.num_return_sequences)
        decoder.reorder(origin)
        scores = decoder.run(beams.ids[:, :, beams.length - 1].reshape(-1, 1))


class _Beams:
    """State of a beam search: N running and N finished beams for each of B prompts.

    L is the maximum length of a sequence in tokens.

    Shape:
        ids, finished_ids: (B, N, L); running, finished (scores): (B, N); is_finished: (B, N);
        finished_length: (B, N); open: (B, 1), True if a running beam could still become one of
            the finished beams
    """

    def __init__(self, prompt: Tensor, config: GenerationConfig) -> None:
        batch, self.prompt_length = prompt.shape
        self.config, self.length = config, self.prompt_length
        self.max_length = self.prompt_length + config.max_new_tokens
        eos = config.eos_tokens
        # transformers fills with the end token when the padding token is 0.
        fill = (config.pad_token_id or eos[0]) if eos else -1
        shape = (batch, config.num_beams)
        self.ids = prompt.new_full((*shape, self.max_length), fill)
        self.ids[:, :, : self.length] = prompt[:, None]
        self.finished_ids = self.ids.clone()
        self.finished_length = torch.full_like(self.ids[:, :, 0], self.length)
        # Only the first beam starts: equal beams would choose the same tokens.
        self.running = torch.zeros(shape, device=prompt.device)
        self.running[:, 1:] = _WORST
        self.finished = torch.full(shape, _WORST, device=prompt.device)
        self.is_finished = torch.zeros(shape, dtype=torch.bool, device=prompt.device)
        self.open = torch.ones(batch, 1, dtype=torch.bool, device=prompt.device)
        self.all_stopped = False

    @property
    def new_tokens(self) -> int:
        """Number of tokens generated so far."""
        return self.length - self.prompt_length

    def advance(self, log_probs: Tensor) -> Tensor:
        """Extend every beam by one token; return the index of the beam that each new beam extends.

        Shape:
            log_probs: (B * N, V) -> (B * N,)
        """
        batch, num_beams = self.running.shape
        total = log_probs.unflatten(0, (batch, num_beams)) + self.running[:, :, None]
        # One more candidate per end token, so that N beams remain even if others end.
        count = max(2, 1 + len(self.config.eos_tokens)) * num_beams
        scores, flat = torch.topk(total.flatten(1), count)
        origin, tokens = flat // log_probs.shape[1], flat % log_probs.shape[1]
        ids = _pick(self.ids, origin)
        ids[:, :, self.length] = tokens
        self.length += 1
        stops = is_one_of(tokens, self.config.eos_tokens) | (self.length >= self.max_length)
        self.all_stopped = bool(stops.all())
        self._finish(ids, scores, stops)
        scores = scores + stops.float() * _WORST
        best = torch.topk(scores, num_beams).indices
        self.ids, self.running = _pick(ids, best), _pick(scores, best)
        self._update_open()
        first_row = torch.arange(batch, device=flat.device)[:, None] * num_beams
        return (_pick(origin, best) + first_row).flatten()

    def _finish(self, ids: Tensor, scores: Tensor, stops: Tensor) -> None:
        """Merge the beams that ended in this step into the finished beams; keep the best N."""
        num_beams = self.running.shape[1]
        ended = stops.clone()
        ended[:, num_beams:] = False  # candidates beyond N only replace ended beams
        scores = scores / (self.new_tokens**self.config.length_penalty)
        if self.config.early_stopping is True:
            scores = scores + self.is_finished.all(-1, keepdim=True).float() * _WORST
        scores = scores + (~self.open).float() * _WORST
        scores = scores + (~ended).float() * _WORST
        scores = torch.cat((self.finished, scores), 1)
        best = torch.topk(scores, num_beams).indices
        lengths = torch.full_like(ended, self.length, dtype=self.finished_length.dtype)
        self.finished = _pick(scores, best)
        self.finished_ids = _pick(torch.cat((self.finished_ids, ids), 1), best)
        self.finished_length = _pick(torch.cat((self.finished_length, lengths), 1), best)
        self.is_finished = _pick(torch.cat((self.is_finished, ended), 1), best)

    def _update_open(self) -> None:
        """Set `open` to False where no running beam can beat the worst finished beam."""
        penalty = self.config.length_penalty
        longest = self.config.early_stopping == "never" and penalty > 0.0
        length = self.config.max_new_tokens if longest else self.new_tokens
        possible = self.running[:, :1] / (length**penalty)
        worst = self.finished.min(1, keepdim=True).values
        worst = torch.where(self.is_finished, worst, _WORST)
        self.open = self.open & (possible > worst).any(-1, keepdim=True)

    def is_done(self) -> bool:
        """Whether no beam can improve the result, all beams ended, or early stopping applies."""
        enough = self.config.early_stopping is True and bool(self.is_finished.all())
        return enough or self.all_stopped or not bool(self.open.any())

    def best(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the `count` best beams of every prompt, padded to one length, and their scores."""
        end = int(self.finished_length[:, :count].max())
        rows = self.finished_ids[:, :count, :end].flatten(0, 1)
        return rows, self.finished[:, :count].flatten()


def _pick(rows: Tensor, indices: Tensor) -> Tensor:
    """Return ``rows[b, indices[b, i]]``: (B, N, ...) and (B, M) -> (B, M, ...)."""
    batch = torch.arange(rows.shape[0], device=rows.device)[:, None]
    return rows[batch, indices]

"""Chooses the next tokens of many answers in one pass over their logits.

Every operation processes each row of logits separately, so an answer's tokens and log-probabilities
are bit-identical whether it is processed alone or in a batch. Answers whose options depend on their
own text (penalties, constraints) use `Answer.choose` instead. Choosing the tokens of 32 sampled
answers one by one took 31 % of the time of a small model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bmforge.device import send_to
from bmforge.infer.options import GenerationConfig
from bmforge.infer.sampling import forbid_tokens, narrow_scores

__all__ = ["TokenChoice", "Draw", "choose_batch", "narrow_sampled"]

# Values of the options that must be equal for answers to be chosen in one pass.
Kind = tuple[bool, float, int | None, float | None, float | None, int | None, str, tuple[int, ...]]


class TokenChoice(NamedTuple):
    """Chosen token and, if requested, its log-probability."""

    token: int
    logprob: float | None


class Draw(NamedTuple):
    """Input for the choice of one token.

    Args:
        config: generation options.
        number: random number in [0, 1); unused in greedy decoding.
        scores: logits of the next token, (V,) in fp32.
        forbidden: tokens that must not be chosen: the EOS tokens of answers that are too short.
    """

    config: GenerationConfig
    number: float
    scores: Tensor
    forbidden: tuple[int, ...] = ()


def narrow_sampled(scores: Tensor, config: GenerationConfig) -> Tensor:
    """Apply the sampling options; return the scores unchanged for greedy decoding.

    Shape:
        scores: (B, V) -> (B, V)
    """
    return narrow_scores(scores, config) if config.do_sample else scores


def choose_batch(draws: Sequence[Draw]) -> list[TokenChoice | None]:
    """Return the chosen token of each draw, or None if the draw's scores are not finite.

    Draws with the same options are processed together.
    """
    groups: dict[Kind, list[int]] = {}
    for number, draw in enumerate(draws):
        groups.setdefault(_kind_of(draw), []).append(number)
    if not groups:
        return []
    chosen = torch.cat([_choose([draws[p] for p in numbers]) for numbers in groups.values()])
    choices: list[TokenChoice | None] = [None] * len(draws)
    order = (number for numbers in groups.values() for number in numbers)
    # One copy to the host, so the CPU waits only once, however many answers there are.
    for number, (token, is_finite, logprob) in zip(order, chosen.cpu().tolist(), strict=True):
        if is_finite:
            has_logprob = draws[number].config.logprobs is not None
            choices[number] = TokenChoice(int(token), logprob if has_logprob else None)
    return choices


def _kind_of(draw: Draw) -> Kind:
    config = draw.config
    return (
        *(config.do_sample, config.temperature, config.top_k, config.top_p, config.min_p),
        config.logprobs,
        config.logprobs_mode,
        draw.forbidden,
    )


def _choose(draws: Sequence[Draw]) -> Tensor:
    """Choose a token for each draw, without waiting for the device.

    Shape:
        returns (draws, 3) in fp64: token, whether all scores are finite, log-probability
    """
    config, forbidden = draws[0].config, draws[0].forbidden
    raw = torch.stack([draw.scores for draw in draws])
    scores = forbid_tokens(raw, forbidden) if forbidden else raw
    narrowed = narrow_sampled(scores, config)
    if config.do_sample:
        numbers = torch.tensor([draw.number for draw in draws], dtype=torch.float64)
        tokens = _draw(narrowed.softmax(-1), send_to(numbers, scores.device))
    else:
        tokens = scores.argmax(-1)
    is_finite = scores.amax(-1).isfinite()  # amax is NaN if any score of the row is NaN
    logprobs = torch.zeros_like(is_finite, dtype=torch.float64)
    if config.logprobs is not None:
        source = narrowed if config.logprobs_mode == "processed_logprobs" else raw
        logprobs = source.log_softmax(-1).gather(1, tokens[:, None])[:, 0].double()
    return torch.stack((tokens.double(), is_finite.double(), logprobs), 1)


def _draw(probabilities: Tensor, numbers: Tensor) -> Tensor:
    """Sample a token per distribution by inverting the cumulative distribution, like `draw_token`.

    Shape:
        probabilities: (B, V); numbers: (B,) in float64; returns (B,)
    """
    sums = probabilities.double().cumsum(-1)
    tokens = torch.searchsorted(sums, (numbers * sums[:, -1])[:, None], right=True)
    inside = tokens.clamp(max=sums.shape[1] - 1)
    is_possible = (inside == tokens) & (probabilities.gather(1, inside) > 0)
    # Rounding of the sums can select an index after the last token, or a token of probability 0.
    index = torch.arange(sums.shape[1], device=sums.device)
    last = index.where(probabilities > 0, 0).amax(-1, keepdim=True)
    return inside.where(is_possible, last)[:, 0]

"""From scores to tokens: pure functions, applied in transformers' order.

Scores are (B, V) logits (log-probabilities in a beam search); -inf forbids a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bmforge.infer.options import GenerationConfig

__all__ = [
    "apply_temperature",
    "choose_tokens",
    "forbid_tokens",
    "is_one_of",
    "keep_top_k",
    "keep_top_p",
    "penalize_repetition",
    "process_scores",
]


def is_one_of(ids: Tensor, tokens: tuple[int, ...]) -> Tensor:
    """Tell for every id whether it is among `tokens`; the shape stays."""
    if not tokens:
        return torch.zeros_like(ids, dtype=torch.bool)
    return torch.isin(ids, torch.tensor(tokens, device=ids.device))


def penalize_repetition(scores: Tensor, ids: Tensor, penalty: float, padding: Tensor) -> Tensor:
    """Divide positive and multiply negative scores of tokens already in the row by `penalty`.

    Ids that have no score, rows of a prompt, do not count.

    Shape:
        scores: (B, V); ids: (B, S); padding: (B,), how many leading ids of a row do not count
    """
    vocab_size = scores.shape[1]
    place = torch.arange(ids.shape[1], device=ids.device)
    ids = ids.masked_fill(place < padding[:, None], vocab_size).clamp(max=vocab_size)
    seen = torch.zeros(ids.shape[0], vocab_size + 1, dtype=torch.bool, device=ids.device)
    seen = seen.scatter(1, ids, True)[:, :vocab_size]
    return torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


def forbid_tokens(scores: Tensor, tokens: tuple[int, ...]) -> Tensor:
    """Give `tokens` the score -inf."""
    vocabulary = torch.arange(scores.shape[1], device=scores.device)
    return scores.masked_fill(is_one_of(vocabulary, tokens), -torch.inf)


def apply_temperature(scores: Tensor, temperature: float) -> Tensor:
    """Divide by the temperature: below 1 sharpens the distribution, above 1 flattens it."""
    return scores / temperature


def keep_top_k(scores: Tensor, k: int) -> Tensor:
    """Forbid every token that scores less than the k-th best (ties with it stay)."""
    worst = torch.topk(scores, min(k, scores.shape[1])).values[:, -1:]
    return scores.masked_fill(scores < worst, -torch.inf)


def keep_top_p(scores: Tensor, p: float) -> Tensor:
    """Forbid all but the fewest likeliest tokens that together have probability `p`."""
    ordered, order = torch.sort(scores)
    drop = ordered.softmax(-1).cumsum(-1) <= 1 - p
    drop[:, -1] = False
    return scores.masked_fill(drop.scatter(1, order, drop), -torch.inf)


def process_scores(
    scores: Tensor, ids: Tensor, new_tokens: int, padding: Tensor, config: GenerationConfig
) -> Tensor:
    """Apply what does not depend on drawing: repetition penalty and shortest length.

    Shape:
        scores: (B, V); ids: (B, S) so far, `new_tokens` of them generated; padding: (B,)
    """
    if config.repetition_penalty != 1.0:
        scores = penalize_repetition(scores, ids, config.repetition_penalty, padding)
    if new_tokens < config.min_new_tokens:
        scores = forbid_tokens(scores, config.eos_tokens)
    return scores


def choose_tokens(
    scores: Tensor, config: GenerationConfig, generator: torch.Generator | None
) -> Tensor:
    """Take the likeliest token of each row, or draw one.

    Shape:
        scores: (B, V) -> (B,)
    """
    if not config.do_sample:
        return scores.argmax(-1)
    if config.temperature != 1.0:
        scores = apply_temperature(scores, config.temperature)
    if config.top_k:
        scores = keep_top_k(scores, config.top_k)
    if config.top_p is not None and config.top_p < 1.0:
        scores = keep_top_p(scores, config.top_p)
    return torch.multinomial(scores.softmax(-1), 1, generator=generator)[:, 0]

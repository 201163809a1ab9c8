"""Pure functions that compute the next tokens from logits, in the order of transformers.

Scores are (B, V) logits (log-probabilities in a beam search); -inf forbids a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bmforge.errors import ConfigError
from bmforge.infer.options import GenerationConfig

__all__ = [
    "Words",
    "add_biases",
    "apply_temperature",
    "check_scores",
    "choose_tokens",
    "draw_number",
    "draw_token",
    "find_bad_words",
    "find_repeats",
    "forbid_tokens",
    "is_one_of",
    "keep_min_p",
    "keep_top_k",
    "keep_top_p",
    "narrow_scores",
    "penalize_repetition",
    "penalize_written",
    "process_scores",
    "prompt_ngrams",
]

_MASK = (1 << 64) - 1

Words = tuple[tuple[int, ...], ...]
"""Token sequences."""


def is_one_of(ids: Tensor, tokens: tuple[int, ...]) -> Tensor:
    """Return a boolean mask of the ids that are among `tokens`, in the shape of `ids`."""
    if not tokens:
        return torch.zeros_like(ids, dtype=torch.bool)
    return torch.isin(ids, torch.tensor(tokens, device=ids.device))


def penalize_repetition(scores: Tensor, ids: Tensor, penalty: float, padding: Tensor) -> Tensor:
    """Apply the repetition penalty to the scores of the tokens that a sequence already contains.

    Positive scores are divided by `penalty`, negative ones multiplied. Ids outside the vocabulary
    (those of a soft prompt) are ignored.

    Shape:
        scores: (B, V); ids: (B, S); padding: (B,), number of leading ids of a sequence to ignore
    """
    vocab_size = scores.shape[1]
    position = torch.arange(ids.shape[1], device=ids.device)
    ids = ids.masked_fill(position < padding[:, None], vocab_size).clamp(max=vocab_size)
    seen = torch.zeros(ids.shape[0], vocab_size + 1, dtype=torch.bool, device=ids.device)
    seen = seen.scatter(1, ids, True)[:, :vocab_size]
    return torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


def penalize_written(scores: Tensor, written: Tensor, presence: float, frequency: float) -> Tensor:
    """Subtract the presence and frequency penalties from the scores of generated tokens.

    Shape:
        scores: (B, V); written: (B, S)

    Source: OpenAI's API reference.
    """
    counts = torch.zeros_like(scores).scatter_add_(1, written, torch.ones_like(written).to(scores))
    return scores - counts * frequency - (counts > 0) * presence


def add_biases(scores: Tensor, biases: Mapping[int, float]) -> Tensor:
    """Add a bias to the scores of some tokens; ids outside the vocabulary are ignored."""
    valid = {id: bias for id, bias in biases.items() if id < scores.shape[1]}
    ids = torch.tensor(list(valid), dtype=torch.int64, device=scores.device)
    return scores.index_add(1, ids, scores.new_tensor(list(valid.values())).expand(len(scores), -1))


def forbid_tokens(scores: Tensor, tokens: tuple[int, ...]) -> Tensor:
    """Set the scores of `tokens` to -inf."""
    vocabulary = torch.arange(scores.shape[1], device=scores.device)
    return scores.masked_fill(is_one_of(vocabulary, tokens), -torch.inf)


def find_repeats(ids: Sequence[int], ngram: int) -> list[int]:
    """Return the tokens that would repeat an n-gram of length `ngram`."""
    if ngram == 0 or len(ids) < ngram:
        return []
    last = list(ids[len(ids) - ngram + 1 :])
    starts = range(len(ids) - ngram + 1)
    return [ids[i + ngram - 1] for i in starts if list(ids[i : i + ngram - 1]) == last]


def prompt_ngrams(ids: Sequence[int], ngram: int) -> Words:
    """Return the n-grams of length `ngram` in a prompt, without repetitions."""
    return tuple(dict.fromkeys(zip(*(ids[first:] for first in range(ngram)), strict=False)))


def find_bad_words(ids: Sequence[int], words: Sequence[Sequence[int]]) -> list[int]:
    """Return the tokens that would complete one of `words`."""
    completing = []
    for word in words:
        begin = len(word) - 1
        if begin <= len(ids) and list(ids[len(ids) - begin :]) == list(word[:-1]):
            completing.append(word[-1])
    return completing


def apply_temperature(scores: Tensor, temperature: float) -> Tensor:
    """Divide scores by the temperature: below 1 sharpens the distribution, above 1 flattens it."""
    return scores / temperature


def keep_top_k(scores: Tensor, k: int) -> Tensor:
    """Forbid every token with a score below the k-th highest; ties remain allowed."""
    worst = torch.topk(scores, min(k, scores.shape[1])).values[:, -1:]
    return scores.masked_fill(scores < worst, -torch.inf)


def keep_top_p(scores: Tensor, p: float) -> Tensor:
    """Forbid all but the smallest set of most likely tokens with total probability `p`."""
    ordered, order = torch.sort(scores)
    drop = ordered.softmax(-1).cumsum(-1) <= 1 - p
    drop[:, -1] = False
    return scores.masked_fill(drop.scatter(1, order, drop), -torch.inf)


def keep_min_p(scores: Tensor, p: float) -> Tensor:
    """Forbid every token with less than `p` times the probability of the most likely token."""
    probabilities = scores.softmax(-1)
    least = p * probabilities.amax(-1, keepdim=True)
    return scores.masked_fill(probabilities < least, -torch.inf)


def process_scores(
    scores: Tensor,
    ids: Tensor,
    new_tokens: int,
    padding: Tensor,
    config: GenerationConfig,
    words: Sequence[Words] = (),
) -> Tensor:
    """Apply the options that also affect greedy decoding.

    These are biases, penalties, forbidden tokens, the minimum length and forced tokens. `words` are
    token sequences that must not be generated, for each prompt; the sequences of a prompt are
    adjacent.

    Shape:
        scores: (B, V); ids: (B, S) so far, `new_tokens` of them generated; padding: (B,)
    """
    if config.logit_bias:
        scores = add_biases(scores, config.logit_bias)
    if config.repetition_penalty != 1.0:
        scores = penalize_repetition(scores, ids, config.repetition_penalty, padding)
    if new_tokens and (config.presence_penalty or config.frequency_penalty):
        penalties = config.presence_penalty, config.frequency_penalty
        scores = penalize_written(scores, ids[:, ids.shape[1] - new_tokens :], *penalties)
    if config.no_repeat_ngram_size or config.bad_words_ids or words:
        scores = scores.clone()
        for row, first in enumerate(padding.tolist()):
            generated = ids[row, first:].tolist()
            banned = find_repeats(generated, config.no_repeat_ngram_size)
            own = words[row * len(words) // len(scores)] if words else ()
            banned += find_bad_words(generated, (*config.bad_words_ids, *own))
            scores[row, [id for id in banned if id < scores.shape[1]]] = -torch.inf
    if new_tokens < config.min_new_tokens:
        scores = forbid_tokens(scores, config.eos_tokens)
    has_forced_start = config.forced_bos_token_id is not None and ids.shape[1] - new_tokens == 1
    if has_forced_start and not new_tokens:
        scores = _force_tokens(scores, (config.forced_bos_token_id or 0,))
    if config.forced_end and new_tokens == config.max_new_tokens - 1:
        scores = _force_tokens(scores, config.forced_end)
    if config.begin_suppress_tokens and new_tokens == int(has_forced_start):
        scores = forbid_tokens(scores, config.begin_suppress_tokens)
    return scores


def _force_tokens(scores: Tensor, tokens: tuple[int, ...]) -> Tensor:
    """Set the scores of `tokens` to 0 (log-probability 0 in a beam search), and others to -inf."""
    vocabulary = torch.arange(scores.shape[1], device=scores.device)
    forced = torch.full_like(scores, -torch.inf)
    return forced.masked_fill(is_one_of(vocabulary, tokens), 0.0)


def narrow_scores(scores: Tensor, config: GenerationConfig) -> Tensor:
    """Apply the sampling options: temperature, top-k, top-p and min-p.

    Shape:
        scores: (B, V) -> (B, V)
    """
    if config.temperature != 1.0:
        scores = apply_temperature(scores, config.temperature)
    if config.top_k:
        scores = keep_top_k(scores, config.top_k)
    if config.top_p is not None and config.top_p < 1.0:
        scores = keep_top_p(scores, config.top_p)
    if config.min_p:
        scores = keep_min_p(scores, config.min_p)
    return scores


def check_scores(scores: Tensor) -> None:
    """Check that every sequence has at least one allowed next token.

    Shape:
        scores: (B, V)

    Raises:
        ConfigError: the model's scores are not finite, or options forbid every token.
    """
    best = scores.amax(-1)  # NaN if any score of the row is NaN
    if bool(best.isfinite().all()):
        return
    if bool((best == -torch.inf).any()):
        raise ConfigError(
            "no token is left to generate: bad_words_ids, logit_bias, no_repeat_ngram_size and "
            "the constraint together exclude the whole vocabulary. Exclude fewer tokens with "
            "one of these options."
        )
    raise ConfigError(
        "the model's logits are not finite (NaN or infinity). Check that the model's files are "
        "intact, and load it in bf16 or fp32 if it was loaded in fp16."
    )


def choose_tokens(
    scores: Tensor,
    config: GenerationConfig,
    generator: torch.Generator | None,
    ended: Tensor | None = None,
) -> Tensor:
    """Return each sequence's most likely next token or, with `do_sample`, a sampled token.

    Args:
        scores: processed scores of the next token.
        config: generation options.
        generator: random generator of sampling.
        ended: True for sequences that have ended; their tokens are ignored.

    Shape:
        scores: (B, V); ended: (B,); returns (B,)
    """
    if not config.do_sample:
        return scores.argmax(-1)
    if ended is not None:  # their scores may all be forbidden, which cannot be sampled from
        scores = scores.masked_fill(ended[:, None], 0.0)
    probabilities = narrow_scores(scores, config).softmax(-1)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


def draw_number(*key: int) -> float:
    """Return a pseudo-random number in [0, 1), a hash of the key.

    Source: mixing function of Steele et al., "Fast splittable pseudorandom number generators"
    (2014).
    """
    state = 0
    for part in key:
        state = ((state ^ (part & _MASK)) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return (state >> 11) / (1 << 53)


def draw_token(probabilities: Tensor, number: float) -> int:
    """Sample a token by inverting the cumulative distribution at a number in [0, 1).

    Shape:
        probabilities: (V,), which need not sum to 1
    """
    sums = probabilities.double().cumsum(0)
    token = int(torch.searchsorted(sums, number * sums[-1], right=True))
    if token == len(sums) or not probabilities[token] > 0:  # rounding error at the end of the sums
        token = int(probabilities.nonzero()[-1])
    return token

"""CPM-Ant's beam search, which reproduces every step of the original code.

It differs from `beam_search` (transformers' algorithm): the EOS token does not count towards the
length, any candidate may end a beam, and the repetition penalty applies to logits (not
log-probabilities) and to generated tokens only.

Source: ``CPMAntBeamSearch`` and ``BeamHypotheses`` in ``cpm_live/generation`` of OpenBMB/CPM-Live.
Its `max_length` is one less than the allowed number of tokens of a sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bmforge.errors import ConfigError
from bmforge.infer.decoder import Decoder
from bmforge.infer.options import GenerationConfig
from bmforge.infer.sampling import check_scores, penalize_repetition

__all__ = ["search_hypotheses"]

# Initial score of all beams but the first, so that only the first one starts.
_WORST = -1.0e9
_UNKNOWN = (
    "presence_penalty",
    "frequency_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "bad_words_ids",
    "logit_bias",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "begin_suppress_tokens",
)


def search_hypotheses(decoder: Decoder, prompt: Tensor, config: GenerationConfig) -> list[int]:
    """Return a prompt's ids with their best continuation, without its end token.

    Args:
        decoder: new decoder whose cache is empty.
        prompt: token ids.
        config: generation options, complete with EOS tokens.

    Shape:
        prompt: (1, T)

    Raises:
        ConfigError: this search does not support an option.
    """
    idle = config.given(*_UNKNOWN)
    if idle:
        raise ConfigError(
            "options are not supported by the beam search of CPM-Ant: "
            f"{', '.join(idle)}. Leave them out, or set num_beams=1."
        )
    width, limit, length = config.num_beams, config.max_new_tokens, prompt.shape[1]
    running = torch.full((width,), _WORST, device=prompt.device)
    running[0] = 0.0
    rows = prompt.repeat(width, 1)
    nothing = torch.zeros_like(rows[:, 0])
    ended: list[tuple[float, list[int]]] = []
    scores = decoder.repeat(width, decoder.run(prompt))
    for step in range(limit + 1):
        if config.repetition_penalty != 1.0 and step:
            written = rows[:, length:]
            scores = penalize_repetition(scores, written, config.repetition_penalty, nothing)
        check_scores(scores)
        total = scores.log_softmax(-1) + running[:, None]
        best, places = total.flatten().topk(2 * width)
        possible = _per_token(float(best[0]), max(step, 1), config)
        if len(ended) == width and min(map(_score, ended)) >= possible:
            break
        going: list[int] = []
        for at, index in enumerate(places.tolist()):
            row, token = divmod(index, scores.shape[1])
            if step == limit or token in config.eos_tokens:
                score = _per_token(float(best[at]), step, config)
                _keep_best(ended, (score, rows[row].tolist()), width)
            else:
                going.append(at)
            if len(going) == width:
                break
        if step == limit:
            break
        running, chosen = best[going], places[going]
        origin, tokens = chosen // scores.shape[1], chosen % scores.shape[1]
        rows = torch.cat((rows[origin], tokens[:, None]), 1)
        decoder.reorder(origin)
        scores = decoder.run(tokens[:, None])
    return max(ended, key=_score)[1]


def _keep_best(
    ended: list[tuple[float, list[int]]], ended_row: tuple[float, list[int]], count: int
) -> None:
    """Add a finished beam to the list of the `count` best; drop the worst beam of a full list."""
    if len(ended) == count:
        worst = min(ended, key=_score)
        if ended_row[0] <= worst[0]:
            return
        ended.remove(worst)
    ended.append(ended_row)


def _per_token(log_probability: float, tokens: int, config: GenerationConfig) -> float:
    return log_probability / tokens**config.length_penalty


def _score(hypothesis: tuple[float, list[int]]) -> float:
    return hypothesis[0]

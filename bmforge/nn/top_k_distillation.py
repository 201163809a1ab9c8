"""Distillation loss against a teacher's stored top-k predictions.

For every token, a file stores the teacher's k most likely tokens with their log-probabilities, and
the total log-probability of all other tokens. The loss is the KL divergence over these k + 1
outcomes; with k equal to the vocabulary size it equals `linear_distillation`. Full logits are never
stored: the head runs over chunks of tokens, and backward recomputes each chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bmforge.batch import IGNORE_INDEX
from bmforge.device import accumulation_dtype
from bmforge.errors import ShapeError
from bmforge.nn.distillation import HeadInput

__all__ = ["TopKPredictions", "compare_answers", "linear_answers", "pick_answers"]

# Upper bound on the logits that exist at a time.
_CHUNK_ELEMENTS = 1 << 23


class TopKPredictions(NamedTuple):
    """Top-k predictions of a teacher for M tokens.

    Shape:
        ids: (M, k), most likely tokens; log_probs: (M, k), their log-probabilities; rest: (M,),
            total log-probability of all other tokens, -inf if there are none
    """

    ids: Tensor
    log_probs: Tensor
    rest: Tensor


def pick_answers(logits: Tensor, count: int, temperature: float = 1.0) -> TopKPredictions:
    """Return the top-k predictions of a teacher.

    Args:
        logits: logits over the whole vocabulary.
        count: number k of predictions per token.
        temperature: divisor T of the logits.

    Shape:
        logits: (M, V)
    """
    logs = torch.log_softmax(logits.to(accumulation_dtype(logits.dtype)) / temperature, -1)
    best, ids = logs.topk(count, -1)
    others = logs.scatter(-1, ids, -torch.inf)
    return TopKPredictions(ids, best, torch.logsumexp(others, -1))


def compare_answers(logits: Tensor, answers: TopKPredictions, temperature: float = 1.0) -> Tensor:
    """Return KL(teacher || student) * T^2 per token; the tokens outside the top k are one class.

    Args:
        logits: logits of the student.
        answers: predictions of the teacher.
        temperature: divisor T of the logits.

    Shape:
        logits: (M, V); returns (M,)
    """
    scaled = logits / temperature
    # The normalizer covers the whole vocabulary, so the top k and the rest sum to 1.
    log_normalizer = torch.logsumexp(scaled, -1, keepdim=True)
    log_probs = scaled.gather(-1, answers.ids) - log_normalizer
    targets = answers.log_probs.to(log_probs)
    top_loss = _kl_terms(targets, log_probs).sum(-1)
    rest_logit = answers.rest.to(log_probs)
    has_rest = rest_logit > -torch.inf
    others = scaled.scatter(-1, answers.ids, -torch.inf)
    # Without any other token, logsumexp would have the gradient of log(0); the `where` removes it.
    others = torch.where(has_rest[:, None], others, torch.zeros_like(others))
    mass = torch.logsumexp(others, -1) - log_normalizer[:, 0]
    rest_loss = _kl_terms(rest_logit.masked_fill(~has_rest, 0), mass).masked_fill(~has_rest, 0)
    return (top_loss + rest_loss) * temperature**2


def _kl_terms(target: Tensor, predicted: Tensor) -> Tensor:
    """Return p (log p - log q) from log-probabilities; terms with p = 0 are 0."""
    probability = target.exp()
    return (probability * (target - predicted)).masked_fill(probability == 0, 0)


def linear_answers(
    student: HeadInput,
    answers: TopKPredictions,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    num_items: float | Tensor | None = None,
) -> Tensor:
    """Return the mean of `compare_answers` over the labeled tokens, without full logits.

    Args:
        student: hidden states and head weights of the student, which receive gradients.
        answers: the teacher's predictions for the same tokens.
        labels: -100 excludes a position from the loss; every other value includes it.
        temperature: temperature with which the teacher's predictions were computed.
        num_items: divisor of the summed loss; None means the number of labels.

    Shape:
        labels: (M,); returns a scalar in fp32 or wider

    Raises:
        ShapeError: the teacher's predictions are for a different number of tokens.
    """
    if answers.ids.shape[0] != student.hidden.shape[0]:
        raise ShapeError(
            f"the student predicts {student.hidden.shape[0]} tokens, but the stored teacher "
            f"predictions are for {answers.ids.shape[0]} tokens. Use the batches for which the "
            "predictions were stored."
        )
    is_counted = labels != IGNORE_INDEX
    if num_items is None:
        num_items = is_counted.sum().clamp(min=1)

    def part(start: int, stop: int) -> Tensor:
        logits = student.select(slice(start, stop)).logits()
        targets = TopKPredictions(*(tensor[start:stop] for tensor in answers))
        losses = compare_answers(logits, targets, temperature)
        return losses.masked_fill(~is_counted[start:stop], 0).sum()

    step = max(1, _CHUNK_ELEMENTS // student.weight.shape[0])
    count = student.hidden.shape[0]
    parts = [
        checkpoint(part, start, min(start + step, count), use_reentrant=False)
        for start in range(0, count, step)
    ]
    return torch.stack(parts).sum() / num_items

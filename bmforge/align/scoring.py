"""Per-token log-probabilities of a batch under a language model, on every parallel layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.functional import pad

from bmforge.nn import HeadInput, linear_logprobs
from bmforge.nn.shard_hooks import VocabCut

__all__ = ["TokenScores", "score_tokens"]


class TokenScores(NamedTuple):
    """Scores of the labels in a batch; 0 at positions without a label.

    Args:
        logprobs: log-probability of each label, in nats.
        entropy: entropy of the model's distribution at each label, in nats; 0 if not requested.
        is_best: 1 if the label has the largest logit, otherwise 0; without gradient.

    Shape:
        all (B, T), in fp32 or wider, at the positions of the labels
    """

    logprobs: Tensor
    entropy: Tensor
    is_best: Tensor


def score_tokens(
    model: Any,
    inputs: Mapping[str, Any],
    labels: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> TokenScores | None:
    """Score labels with a language model, without storing the logits of the vocabulary.

    The result is the same on every layout and on all ranks that share the rows: tensor- and
    sequence-parallel ranks sum over the vocabulary, context-parallel ranks gather the tokens.
    Gradients flow through log-probabilities and entropy. The load-balancing loss of experts is not
    part of the scores.

    Args:
        model: causal language model or encoder-decoder with its head.
        inputs: arguments of the model, without labels.
        labels: token ids to score, not shifted; -100 for tokens that are not scored. The first
            token of a causal language model's row is never scored, because it is not predicted.
        temperature: divisor of the logits (default: 1).
        with_entropy: True to compute the entropy too (default: False).

    Returns:
        the scores; None on pipeline stages before the last, which have no head

    Shape:
        labels: (B, T)

    Comm: the collectives of the model's forward pass; with context parallelism, also an all-reduce
    of 3 numbers per token in the forward and the backward pass.
    """

    def measure(head: HeadInput, targets: Tensor, num_items: Any, vocab: VocabCut | None) -> Tensor:
        return linear_logprobs(
            head, targets, temperature=temperature, vocab=vocab, with_entropy=with_entropy
        )

    out = model(**inputs, labels=labels, num_items_in_batch=measure).loss
    if out is None:
        return None
    scores = out.view(3, len(labels), -1)
    if model.shifts_labels and model.config.head == "language_model":
        # The model returns each score at the position that predicts the label, one position
        # earlier.
        scores = pad(scores[..., :-1], (1, 0))
    # A soft prompt adds positions at the beginning, which have no label.
    return TokenScores(*scores[..., -labels.shape[1] :].unbind())

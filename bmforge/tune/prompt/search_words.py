"""Label word search (LM-BFF): finds one token per class with the best zero-shot accuracy.

Source: Gao et al., "Making pre-trained language models better few-shot learners" (2021).
"""

from __future__ import annotations

import torch
from torch import Tensor

from bmforge.errors import ConfigError

__all__ = ["search_label_words"]


def search_label_words(
    logits: Tensor,
    labels: Tensor,
    *,
    num_candidates: int = 100,
    keep: int = 10,
    max_tries: int = 200_000,
) -> list[tuple[list[int], float]]:
    """Search for the best sets of label words; return them with their accuracy on the examples.

    Ties are broken by the probability of the words. The caller may train with each set and select
    the best one on validation examples.

    Args:
        logits: logits at the masks of labeled examples.
        labels: class indices of the examples.
        num_candidates: candidate tokens per class: the most probable tokens on the class's
            examples.
        keep: number of sets to return.
        max_tries: maximum number of sets to try; if there are more, fewer candidates are used per
            class.

    Shape:
        logits: (N, V); labels: (N,)

    Raises:
        ConfigError: a class has no examples, or a count is below 1.
    """
    classes = int(labels.max()) + 1
    missing = [number for number in range(classes) if not bool((labels == number).any())]
    if missing or min(num_candidates, keep, max_tries) < 1:
        raise ConfigError(
            f"every class must have examples (classes without examples: {missing}), and "
            f"num_candidates={num_candidates}, keep={keep} and max_tries={max_tries} must be at "
            "least 1."
        )
    count = min(num_candidates, max(1, int(max_tries ** (1 / classes))), logits.shape[1])
    chances = logits.float().softmax(-1)
    top_words = [chances[labels == number].mean(0).topk(count) for number in range(classes)]
    places = torch.cartesian_prod(*[torch.arange(count)] * classes).view(-1, classes)
    sets = torch.stack([top.indices.cpu()[places[:, n]] for n, top in enumerate(top_words)], 1)
    likely = sum(top.values.cpu()[places[:, n]] for n, top in enumerate(top_words))
    right = torch.zeros(len(sets))
    for row, label in zip(logits.float().cpu(), labels.tolist(), strict=True):
        right += row[sets].argmax(-1) == label
    # A token that is a candidate of two classes distinguishes neither.
    ordered = sets.sort(-1).values
    shared = (ordered[:, 1:] == ordered[:, :-1]).any(-1)
    value = (right + likely / (1 + likely.max())).masked_fill(shared, -1.0)  # type: ignore[union-attr]
    best = value.argsort(descending=True, stable=True)[:keep]
    best = best[~shared[best]]
    return [(sets[n].tolist(), float(right[n]) / len(labels)) for n in best.tolist()]

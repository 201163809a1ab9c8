"""Label words that are found: those that tell a class's examples from the others'.

Source: Schick et al., "Automatically identifying words that can serve as labels for few-shot text
classification" (2020).
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from bmforge.errors import ConfigError

__all__ = ["find_label_tokens"]

_TINY = 1e-15


def find_label_tokens(
    logits: Tensor,
    labels: Tensor,
    *,
    words_per_class: int = 1,
    num_candidates: int = 1000,
    score: Literal["llr", "ce"] = "llr",
    balance: bool = True,
) -> list[list[int]]:
    """Return the tokens that tell each class best, the best first.

    Args:
        logits: at the masks of labelled examples.
        labels: their classes, from 0.
        words_per_class: how many tokens each gets.
        num_candidates: tokens a class chooses from: those its own examples find likely.
        score: log-likelihood ratio, or cross-entropy.
        balance: the other classes' examples weigh as much as the class's own.

    Shape:
        logits: (N, V); labels: (N,)

    Raises:
        ConfigError: a class without examples, or one that has all.
    """
    if score not in ("llr", "ce"):
        raise ConfigError(f"score={score!r} is unknown. Known: llr, ce.")
    chances = logits.float().softmax(-1)
    log_yes, log_no = (chances + _TINY).log(), (1 - chances + _TINY).log()
    found = []
    for number in range(int(labels.max()) + 1):
        mine = labels == number
        if not mine.any() or mine.all():
            raise ConfigError(f"class {number} has {int(mine.sum())} of {len(labels)} examples.")
        likely = log_yes[mine].sum(0).argsort(descending=True)[:num_candidates]
        factor = float(mine.sum() / (~mine).sum()) if balance else 1.0
        yes, no = log_yes[:, likely], log_no[:, likely]
        if score == "llr":
            value = (yes - no)[mine].sum(0) + factor * (no - yes)[~mine].sum(0)
        else:
            value = yes[mine].sum(0) + factor * no[~mine].sum(0)
        found.append(likely[value.argsort(descending=True)[:words_per_class]].tolist())
    return found

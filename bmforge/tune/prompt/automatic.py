"""Automatic label word search (PETAL): finds the tokens that best separate the classes.

Source: Schick et al., "Automatically identifying words that can serve as labels for few-shot text
classification" (2020).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from bmforge.errors import ConfigError
from bmforge.tokenizers import Tokenizer
from bmforge.tune.prompt.verbalizer import ManualVerbalizer

__all__ = ["AutomaticVerbalizer", "find_label_tokens"]

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
    """Find the most discriminative tokens of each class, the best first.

    Args:
        logits: logits at the masks of labeled examples.
        labels: classes of the examples, from 0.
        words_per_class: number of tokens to return per class.
        num_candidates: candidate tokens per class: the most probable tokens on the class's
            examples.
        score: "llr" for the log-likelihood ratio, or "ce" for cross-entropy.
        balance: True to weight the examples of all other classes together like those of the class.

    Shape:
        logits: (N, V); labels: (N,)

    Raises:
        ConfigError: a class has no examples, or all examples belong to one class.
    """
    if score not in ("llr", "ce"):
        raise ConfigError(f"unknown score: score={score!r} (supported: llr, ce).")
    chances = logits.float().softmax(-1)
    log_yes, log_no = (chances + _TINY).log(), (1 - chances + _TINY).log()
    tokens = []
    for number in range(int(labels.max()) + 1):
        in_class = labels == number
        if not in_class.any() or in_class.all():
            raise ConfigError(
                f"class {number} has {int(in_class.sum())} of the {len(labels)} examples. Pass "
                "examples of at least two classes, and of every class, so that label words can "
                "be compared between classes."
            )
        likely = log_yes[in_class].sum(0).argsort(descending=True)[:num_candidates]
        factor = float(in_class.sum() / (~in_class).sum()) if balance else 1.0
        yes, no = log_yes[:, likely], log_no[:, likely]
        if score == "llr":
            value = (yes - no)[in_class].sum(0) + factor * (no - yes)[~in_class].sum(0)
        else:
            value = yes[in_class].sum(0) + factor * no[~in_class].sum(0)
        tokens.append(likely[value.argsort(descending=True)[:words_per_class]].tolist())
    return tokens


class AutomaticVerbalizer(ManualVerbalizer):
    """Verbalizer whose label words are chosen automatically from labeled examples (PETAL).

    It has no words until `fit_` is called; after that it works like a `ManualVerbalizer`.

    Args:
        num_classes: number of classes, C.
        tokenizer: the model's tokenizer.
        normalize: True to return log-probabilities, as in `ManualVerbalizer`.
        options: options of `find_label_tokens`.
    """

    def __init__(
        self, num_classes: int, tokenizer: Tokenizer, normalize: bool = True, **options: Any
    ) -> None:
        torch.nn.Module.__init__(self)
        self._tokenizer, self._options = tokenizer, options
        self.classes = [str(number) for number in range(num_classes)]
        self.words: list[list[str]] = [[] for _ in self.classes]
        self.join, self.normalize, self.takes = "first", normalize, "logits"
        self.prior = None

    def fit_(self, logits: Tensor, labels: Tensor) -> None:
        """Choose the label words from labeled examples.

        Args:
            logits: logits at the masks of the examples.
            labels: classes of the examples.

        Shape:
            logits: (N, V); labels: (N,)

        Raises:
            ConfigError: a class has no example.
        """
        tokens = find_label_tokens(logits, labels, **self._options)
        if len(tokens) != self.num_classes:
            raise ConfigError(
                f"the labels contain classes up to {len(tokens) - 1}, but "
                f"num_classes={self.num_classes}. Pass examples of every class."
            )
        self.words = [["<!>" + self._tokenizer.decode([id]) for id in row] for row in tokens]
        self._set_tokens([[[id] for id in row] for row in tokens])
        self.to(logits.device)

    def forward(self, logits: Tensor) -> Tensor:
        """Return the log-probabilities of the classes; see `ManualVerbalizer.forward`.

        Raises:
            ConfigError: `fit_` has not been called yet.
        """
        if not hasattr(self, "ids"):
            raise ConfigError(
                "no label words have been chosen yet. Call fit_ with labeled examples first."
            )
        return super().forward(logits)

"""The head of a language model: a linear layer that can give its loss without its logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.batch import IGNORE_INDEX
from bmforge.nn.cuts import PickTokens, VocabCut
from bmforge.nn.losses import check_classes, linear_cross_entropy

__all__ = ["LMHead"]


class LMHead(nn.Linear):
    """Hidden states to a score for every token of the vocabulary, or to the loss.

    Attributes:
        vocab: how the rows are divided over processes; None where they are all here.
        pick_tokens: which tokens' loss is computed here; None computes that of all.

    Shape:
        x: (..., D) -> (..., V), or a scalar with labels
    """

    vocab: VocabCut | None = None
    pick_tokens: PickTokens | None = None

    def forward(
        self,
        x: Tensor,
        labels: Tensor | None = None,
        num_items: float | Tensor | None = None,
        *,
        shift: bool = False,
        more_rows: Tensor | None = None,
    ) -> Tensor:
        """Return the logits of the whole vocabulary or, with labels, their cross-entropy.

        Args:
            x: hidden states.
            labels: tokens to predict, -100 for none.
            num_items: what the summed loss is divided by; None takes the mean.
            shift: position t predicts label t + 1, as in transformers; else its own.
            more_rows: further rows of the head, for tokens from V on.

        Shape:
            labels: (...), with `shift` (B, T); more_rows: (E, D)
        """
        vocab = self.vocab
        if labels is None:
            return self._score(x, more_rows)
        if shift:
            labels = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        x, labels = x.flatten(0, -2), labels.flatten()
        if vocab is not None:
            # Of all processes' rows, so that all refuse alike and none waits for the others.
            check_classes(labels, vocab.rows + (0 if more_rows is None else more_rows.shape[0]))
        if self.pick_tokens is not None:
            if num_items is None:
                num_items = (labels != IGNORE_INDEX).sum().clamp(min=1)
            x, labels, num_items = self.pick_tokens(x, labels, num_items)
        x = x if vocab is None else vocab.enter(x)
        weight, bias = self.weight, self.bias
        if more_rows is not None:
            if vocab is not None:
                # They follow the last row of all; elsewhere none of them, which keeps their
                # gradient's sum over the processes alive.
                more_rows = vocab.enter(more_rows)[: None if vocab.is_last else 0]
            weight = torch.cat((weight, more_rows))
        return linear_cross_entropy(x, weight, labels, bias, num_items, vocab)

    def _score(self, x: Tensor, more_rows: Tensor | None) -> Tensor:
        x = x if self.vocab is None else self.vocab.enter(x)
        logits = F.linear(x, self.weight, self.bias)
        logits = logits if self.vocab is None else self.vocab.gather(logits)
        return logits if more_rows is None else torch.cat((logits, F.linear(x, more_rows)), -1)

"""The head of a language model: a linear layer that can give its loss without its logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.batch import IGNORE_INDEX
from bmforge.errors import ConfigError
from bmforge.nn.channel import Shift
from bmforge.nn.cuts import PickTokens, Rows, VocabCut
from bmforge.nn.distillation import HeadInput
from bmforge.nn.losses import check_classes, linear_cross_entropy
from bmforge.nn.low_rank import LowRank
from bmforge.nn.part import beside_parts
from bmforge.nn.products import multiply_dense

__all__ = ["LMHead", "Measure"]

# (what makes logits, labels (M,), what the sum is divided by, how the rows are divided) -> loss
Measure = Callable[[HeadInput, Tensor, float | Tensor | None, VocabCut | None], Tensor]


class LMHead(nn.Linear):
    """Hidden states to a score for every token of the vocabulary, or to the loss.

    Attributes:
        vocab: how the rows are divided over processes; None where they are all here.
        pick_tokens: which tokens' loss is computed here; None computes that of all.
        measure: what makes the loss; None takes the cross-entropy.

    Shape:
        x: (..., D) -> (..., V), or a scalar with labels
    """

    vocab: VocabCut | None = None
    pick_tokens: PickTokens | None = None
    measure: Measure | None = None
    # Low-rank parts beside it go into the loss as well, where no hook could add them.
    asks_parts = True

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """Return the rows that are here; those kept in another form as numbers of `dtype`."""
        return self.weight

    def sliced(self, dtype: torch.dtype) -> Rows:
        """Return the same for a loss, which takes some rows at a time."""
        return self.matrix(dtype)

    def score(self, x: Tensor) -> Tensor:
        """Return the logits of the rows that are here, parts beside left out."""
        matrix = self.matrix(x.dtype)
        found = multiply_dense(x, matrix, self.bias)
        return F.linear(x, matrix, self.bias) if found is None else found

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
        bias, added = self._whole_bias(x.dtype), self._added(x)
        if more_rows is None and self.measure is None:
            rows = self.sliced(x.dtype)
            return linear_cross_entropy(x, rows, labels, bias, num_items, vocab, added)
        weight = self.matrix(x.dtype)
        if more_rows is not None:
            if vocab is not None:
                # They follow the last row of all; elsewhere none of them, which keeps their
                # gradient's sum over the processes alive.
                more_rows = vocab.enter(more_rows)[: None if vocab.is_last else 0]
            weight = torch.cat((weight, more_rows))
            bias = None if bias is None else F.pad(bias, (0, more_rows.shape[0]))
            added = [(low, _lengthen(up, weight)) for low, up in added]
        if self.measure is not None:
            return self.measure(HeadInput(x, weight, bias, tuple(added)), labels, num_items, vocab)
        return linear_cross_entropy(x, weight, labels, bias, num_items, vocab, added)

    def _score(self, x: Tensor, more_rows: Tensor | None) -> Tensor:
        x = x if self.vocab is None else self.vocab.enter(x)
        logits = self.score(x)
        for shift in self._shifts():
            logits = logits + shift.to(logits.dtype)
        for low, up in self._added(x):
            logits = logits + F.linear(low, up)
        logits = logits if self.vocab is None else self.vocab.gather(logits)
        return logits if more_rows is None else torch.cat((logits, F.linear(x, more_rows)), -1)

    def _whole_bias(self, dtype: torch.dtype) -> Tensor | None:
        """Return the bias of the rows that are here, with what parts beside add to it."""
        bias = self.bias
        for shift in self._shifts():
            bias = shift.to(dtype) if bias is None else bias + shift.to(bias.dtype)
        return bias

    def _shifts(self) -> list[Tensor]:
        """Return the biases that parts beside add, (V,) each."""
        found = [part for _, part in beside_parts(self) if isinstance(part, Shift) and part.share]
        return [part() * part.share if part.share != 1 else part() for part in found]

    def _added(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the low-rank parts' own hidden states and rows: (..., R) and (V, R) of each.

        Raises:
            ConfigError: a part of another kind, which could not be in the loss.
        """
        found = []
        for name, part in beside_parts(self):
            if isinstance(part, Shift) or part.share == 0:
                continue
            if not isinstance(part, LowRank):
                raise ConfigError(
                    f"{name!r} beside a language model's head is a {type(part).__name__}: the loss "
                    "is made inside the head, which takes low-rank parts and biases only."
                )
            low, up = part.factors(x)
            low = low if part.share == 1 else low * part.share
            found.append((low.to(x.dtype), up.to(x.dtype)))  # parts may be kept in a wider one
        return found


def _lengthen(up: Tensor, weight: Tensor) -> Tensor:
    """Give `up` rows of zeros for what the head was given beyond its own."""
    return F.pad(up, (0, 0, 0, weight.shape[0] - up.shape[0]))

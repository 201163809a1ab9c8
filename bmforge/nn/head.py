"""Language model head: a linear layer that can compute the loss without materialized logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.batch import IGNORE_INDEX
from bmforge.errors import ConfigError
from bmforge.nn.adapter_selection import weight_of
from bmforge.nn.channel import BiasAdapter
from bmforge.nn.distillation import HeadInput
from bmforge.nn.losses import check_classes, linear_cross_entropy
from bmforge.nn.low_rank import LowRank
from bmforge.nn.part import adapters_of
from bmforge.nn.products import multiply_dense
from bmforge.nn.shard_hooks import HeadRows, JoinTokens, PickTokens, VocabCut
from bmforge.nn.softcap import apply_softcap
from bmforge.nn.token_rows import TokenRows

__all__ = ["LMHead", "Measure"]

# (head inputs, labels (M,), divisor of the sum, sharding of the vocabulary) -> the loss or, if
# passed to `LMHead.forward`, K scores of every token, (K, M)
Measure = Callable[[HeadInput, Tensor, float | Tensor | None, VocabCut | None], Tensor]


class LMHead(nn.Linear):
    """Maps hidden states to logits over the vocabulary or, if labels are given, to the loss.

    Attributes:
        vocab: sharding of the weight over the vocabulary; None if it is not sharded.
        pick_tokens: function that selects the tokens of this rank's loss; None means all.
        join_tokens: function that all-gathers the scores of the selected tokens; None if all
            are selected.
        measure: loss function; None means cross-entropy.
        softcap: cap c of the logits z, which become ``c * tanh(z / c)``; None means no cap.

    Shape:
        x: (..., D) -> (..., V), or a scalar with labels
    """

    vocab: VocabCut | None = None
    pick_tokens: PickTokens | None = None
    join_tokens: JoinTokens | None = None
    measure: Measure | None = None
    softcap: float | None = None
    # Low-rank adapters take part in the fused loss too, where a forward hook could not add them.
    applies_adapters = True

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """Return this rank's rows of the weight; a quantized weight is dequantized to `dtype`."""
        return self.weight

    def sliced(self, dtype: torch.dtype) -> HeadRows:
        """Return the weight as `HeadRows`, of which the loss reads some rows at a time."""
        return self.matrix(dtype)

    def score(self, x: Tensor) -> Tensor:
        """Return the logits for this rank's vocabulary rows, without adapters."""
        matrix = self.matrix(x.dtype)
        logits = multiply_dense(x, matrix, self.bias)
        return F.linear(x, matrix, self.bias) if logits is None else logits

    def forward(
        self,
        x: Tensor,
        labels: Tensor | None = None,
        num_items: float | Tensor | Measure | None = None,
        *,
        shift: bool = False,
        more_rows: Tensor | None = None,
    ) -> Tensor:
        """Return the logits of the whole vocabulary or, with labels, the cross-entropy.

        Args:
            x: hidden states.
            labels: target tokens, -100 to ignore a position.
            num_items: divisor of the summed loss; None means the mean. If a `Measure` is passed
                instead, its scores for the tokens of all ranks are returned, and no loss.
            shift: position t predicts label t + 1, as in transformers; otherwise label t.
            more_rows: additional rows of the head, for token ids V, V + 1, ...

        Shape:
            labels: (...), with `shift` (B, T); more_rows: (E, D); scores: (K, M), M tokens
        """
        vocab = self.vocab
        if labels is None:
            return self._score(x, more_rows)
        if shift:
            labels = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        x, labels = x.flatten(0, -2), labels.flatten()
        if vocab is not None:
            # Checked against the whole vocabulary, so that all ranks raise the error and no rank
            # waits in a collective.
            check_classes(labels, vocab.rows + (0 if more_rows is None else more_rows.shape[0]))
        measure, divisor = (num_items, 1.0) if callable(num_items) else (self.measure, num_items)
        total = x.shape[0]
        if self.pick_tokens is not None:
            if divisor is None:
                divisor = (labels != IGNORE_INDEX).sum().clamp(min=1)
            x, labels, divisor = self.pick_tokens(x, labels, divisor)
        x = x if vocab is None else vocab.sum_backward(x)
        inputs = self._inputs(x, more_rows, is_sliced=measure is None or callable(num_items))
        if measure is None:
            hidden, rows, bias, added, cap = inputs
            return linear_cross_entropy(hidden, rows, labels, bias, divisor, vocab, added, cap)
        scores = measure(inputs, labels, divisor, vocab)
        join = self.join_tokens if callable(num_items) else None
        return scores if join is None else join(scores, total)

    def _inputs(self, x: Tensor, more_rows: Tensor | None, is_sliced: bool) -> HeadInput:
        """Return a fused loss's inputs: hidden states, weight rows, bias and LoRA factors.

        Args:
            x: hidden states, (M, D).
            more_rows: additional rows of the head.
            is_sliced: True if the loss slices the weight, which then stays quantized.
        """
        vocab = self.vocab
        bias, added = self._whole_bias(x.dtype), self._added(x)
        if more_rows is None:
            rows: Any = self.sliced(x.dtype) if is_sliced else self.matrix(x.dtype)
            return HeadInput(x, rows, bias, tuple(added), self.softcap)
        weight = self.matrix(x.dtype)
        if vocab is not None:
            # They follow the last row of the last rank. The other ranks use an empty slice,
            # which keeps the gradient's all-reduce in their graphs.
            more_rows = vocab.sum_backward(more_rows)[: None if vocab.is_last else 0]
        weight = torch.cat((weight, more_rows))
        bias = None if bias is None else F.pad(bias, (0, more_rows.shape[0]))
        pairs = tuple((low, _lengthen(up, weight)) for low, up in added)
        return HeadInput(x, weight, bias, pairs, self.softcap)

    def _score(self, x: Tensor, more_rows: Tensor | None) -> Tensor:
        x = x if self.vocab is None else self.vocab.sum_backward(x)
        logits = self.score(x)
        for shift in self._shifts():
            logits = logits + shift.to(logits.dtype)
        for low, up in self._added(x):
            logits = logits + F.linear(low, up)
        logits = logits if self.vocab is None else self.vocab.gather(logits)
        if more_rows is not None:
            logits = torch.cat((logits, F.linear(x, more_rows)), -1)
        return apply_softcap(logits, self.softcap)

    def _whole_bias(self, dtype: torch.dtype) -> Tensor | None:
        """Return this rank's bias, including bias adapters."""
        bias = self.bias
        for shift in self._shifts():
            bias = shift.to(dtype) if bias is None else bias + shift.to(bias.dtype)
        return bias

    def _shifts(self) -> list[Tensor]:
        """Return the bias vectors, (V,), of the attached bias adapters."""
        shifts = (part for _, part in adapters_of(self) if isinstance(part, BiasAdapter))
        weighted = [(part, weight_of(part)) for part in shifts]
        return [part() * w if w != 1 else part() for part, w in weighted if w]

    def _added(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return each LoRA adapter's low-rank hidden states, (..., R), and `up` matrix, (V, R).

        Raises:
            ConfigError: an attached adapter is of a kind that the fused loss does not support.
        """
        factors = []
        for name, part in adapters_of(self):
            weight = weight_of(part)
            if isinstance(part, BiasAdapter) or weight == 0:
                continue
            if isinstance(part, TokenRows):
                low, up = part.factors(x, self.matrix(x.dtype))
                factors.append((low if weight == 1 else low * weight, up))
                continue
            if not isinstance(part, LowRank):
                raise ConfigError(
                    f"adapter {name!r} of the language-model head is a {type(part).__name__}, but "
                    "the fused loss supports only low-rank, bias and token-row adapters on the "
                    "head. Exclude the head from the targets."
                )
            low, up = part.factors(x)
            low = low if weight == 1 else low * weight
            factors.append((low.to(x.dtype), up.to(x.dtype)))  # adapters may be wider
        return factors


def _lengthen(up: Tensor, weight: Tensor) -> Tensor:
    """Pad the LoRA matrix `up` with zero rows to the length of the extended head."""
    return F.pad(up, (0, 0, 0, weight.shape[0] - up.shape[0]))

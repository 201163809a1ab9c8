"""Distillation loss KL(teacher || student), from hidden states and without full logits.

As in `losses.py`, the full logits of either model are never stored: both heads run over chunks of
tokens (on a CPU also of columns), and the student's gradient is computed while a chunk's logits are
in memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bmforge.batch import IGNORE_INDEX
from bmforge.device import accumulation_dtype
from bmforge.errors import ConfigError, ShapeError
from bmforge.nn.losses import TiledLoss, as_number, find_labeled, find_tiling, split_chunks
from bmforge.nn.shard_hooks import VocabCut
from bmforge.nn.softcap import apply_softcap
from bmforge.nn.tiled_logits import TiledHead, TiledLogits

__all__ = ["HeadInput", "linear_distillation"]


class HeadInput(NamedTuple):
    """Inputs of a head, whose logits are ``hidden @ weight.T + bias`` plus the `added` products.

    With `softcap` the sum is capped, see `tiled_logits.TiledLogits`.

    Shape:
        hidden: (M, D); weight: (V, D); bias: (V,); added: (M, R) and (V, R) each
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    added: tuple[tuple[Tensor, Tensor], ...] = ()
    softcap: float | None = None

    def select(self, tokens: slice | Tensor) -> HeadInput:
        """Return the inputs of some tokens, by a slice, a boolean mask (M,) or indices (N,)."""
        added = tuple((low[tokens], rows) for low, rows in self.added)
        return self._replace(hidden=self.hidden[tokens], added=added)

    def logits(self) -> Tensor:
        """Return the logits, (M, V), in fp32 or wider."""
        logits = F.linear(self.hidden, self.weight, self.bias)
        for low, rows in self.added:
            logits = logits + F.linear(low, rows)
        return apply_softcap(logits.to(accumulation_dtype(logits.dtype)), self.softcap)

    def detach(self) -> HeadInput:
        """Return a copy that is detached from the autograd graph."""
        bias = None if self.bias is None else self.bias.detach()
        added = tuple((low.detach(), rows.detach()) for low, rows in self.added)
        hidden, weight = self.hidden.detach(), self.weight.detach()
        return HeadInput(hidden, weight, bias, added, self.softcap)


class _DistillationArgs(NamedTuple):
    """Arguments of the distillation loss that need no gradient."""

    teacher: HeadInput
    temperature: float
    vocab: VocabCut | None
    softcap: float | None


class _LinearDistillation(TiledLoss):
    """Autograd function of the summed loss: KL(teacher || student) * T^2 * `scale`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        is_counted: Tensor,
        scale: Tensor,
        teaching: _DistillationArgs,
        *added: Tensor,
    ) -> Tensor:
        teacher, temperature, vocab, softcap = teaching
        columns, wide = weight.shape[0], scale.dtype
        tiling = find_tiling(hidden, weight, vocab)
        if softcap is not None or teacher.softcap is not None:
            # The derivative of the cap is stored for one tile only, so every tile is recomputed.
            tiling = tiling._replace(keeps=False)
        head = TiledHead(hidden, weight, bias, added, ctx.needs_input_grad, wide)
        student_logits = TiledLogits(head, tiling, softcap)
        flat = tuple(itertools.chain.from_iterable(teacher.added))
        # `TiledHead` expects a flag for each input of `TiledLoss`: six, and the low-rank factors.
        no_grads = (False,) * (6 + len(flat))
        teacher_head = TiledHead(teacher.hidden, teacher.weight, teacher.bias, flat, no_grads, wide)
        teacher_logits = TiledLogits(teacher_head, tiling, teacher.softcap)
        total = torch.zeros_like(scale)
        for start, count in split_chunks(hidden.shape[0], tiling.tokens):
            tokens = slice(start, start + count)
            pair = _Pair(is_counted[tokens], vocab, wide, temperature)
            for first, size in split_chunks(columns, tiling.columns):
                teacher_tile = teacher_logits.make(tokens, first, size)
                pair.add_(student_logits.make(tokens, first, size), teacher_tile, first)
            # The gradient needs the sums over all columns (and ranks), so it is a second loop over
            # the tiles.
            total += pair.finish()
            if not any(ctx.needs_input_grad):
                continue
            for first, size in split_chunks(columns, tiling.columns):
                both = student_logits, teacher_logits
                tile, teacher_tile = (logits.reload(tokens, first, size) for logits in both)
                is_exponential = [logits.keeps_exponentials for logits in both]
                pair.differentiate_(tile, teacher_tile, first, is_exponential)
                head.collect_(
                    student_logits.narrow(tile, scale), tokens, slice(first, first + size)
                )
            head.finish_tokens_(tokens)
        TiledLoss.keep_(ctx, head, scale, (hidden, weight, bias, *added))
        return total * scale


class _Pair:
    """Accumulates the loss and gradient of a chunk of tokens over tiles of both heads' logits.

    With z the teacher's and y the student's logits, divided by the temperature, and p the teacher's
    softmax, the loss is ``sum p (z - y) - logsumexp z + logsumexp y``, accumulated with running
    maxima as in `tiled_logits.TiledSoftmax`.
    """

    def __init__(
        self, is_counted: Tensor, vocab: VocabCut | None, wide: torch.dtype, temperature: float
    ) -> None:
        self._vocab, self._kept, self._temperature = vocab, is_counted[:, None], temperature
        shape = {"size": (2, *self._kept.shape), "dtype": wide, "device": is_counted.device}
        # Index 0 is the student, 1 the teacher.
        self._top = torch.full(fill_value=torch.finfo(wide).min, **shape)
        self._mass = torch.zeros(**shape)
        self._cross = torch.zeros_like(self._mass[0])
        self._tops: dict[int, Tensor] = {}

    def add_(self, student: Tensor, teacher: Tensor, first: int) -> None:
        """Add tiles of both models' logits to the softmax sums; exponentials overwrite the tiles.

        `first` is the index of the tiles' first column in this rank's vocabulary.
        """
        student.div_(self._temperature)
        teacher.div_(self._temperature)
        # Before the tiles are overwritten with exponentials.
        gap = teacher - student
        top = torch.stack((student.amax(-1, keepdim=True), teacher.amax(-1, keepdim=True)))
        top = torch.maximum(self._top, top)
        student.sub_(top[0]).exp_()
        teacher.sub_(top[1]).exp_()
        # A term with p = 0 is 0, also where both logits are -inf and their difference is NaN.
        gap.mul_(teacher).masked_fill_(teacher == 0, 0)
        before = (self._top - top).exp_()
        sums = torch.stack((student.sum(-1, keepdim=True), teacher.sum(-1, keepdim=True)))
        self._mass = self._mass * before + sums
        self._cross = self._cross * before[1] + gap.sum(-1, keepdim=True)
        self._top = self._tops[first] = top

    def finish(self) -> Tensor:
        """Return the loss summed over all tiles and ranks."""
        if self._vocab is not None:
            top = self._vocab.max_(self._top.clone())
            change = (self._top - top).exp_()
            sums = torch.cat((self._mass * change, (self._cross * change[1])[None]))
            sums = self._vocab.sum_(sums)
            self._mass, self._cross, self._top = sums[:2], sums[2], top
        student, teacher = (self._mass.log() + self._top).unbind()
        loss = self._cross / self._mass[1] + (student - teacher)
        return loss.where(self._kept, 0).sum() * self._temperature**2

    def differentiate_(
        self, student: Tensor, teacher: Tensor, first: int, is_exponential: Sequence[bool]
    ) -> None:
        """Overwrite a tile of the student's logits with the gradient of the loss.

        `is_exponential` has a flag for each of the two tiles: True if it contains exponentials
        instead of logits.
        """
        # T: the factor T^2 of the loss, times 1 / T from the division of the logits.
        weight = self._kept * self._temperature / self._mass
        for tile, top, normalizer, part, is_power in zip(
            (student, teacher), self._tops[first], self._top, weight, is_exponential, strict=True
        ):
            if is_power:
                tile.mul_((top - normalizer).exp_().mul_(part))
            else:
                tile.div_(self._temperature).sub_(normalizer).exp_().mul_(part)
        student.sub_(teacher)


def linear_distillation(
    student: HeadInput,
    teacher: HeadInput,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    num_items: float | Tensor | None = None,
    vocab: VocabCut | None = None,
) -> Tensor:
    """Return KL(teacher || student) * T^2 of next-token predictions, without full logits.

    Args:
        student: hidden states and head weights of the student, which receive gradients.
        teacher: hidden states and head weights of the teacher, for the same tokens and
            vocabulary, with the same sharding.
        labels: -100 excludes a position from the loss; every other value includes it.
        temperature: divisor T of both models' logits.
        num_items: divisor of the summed loss; None means the number of labels.
        vocab: sharding of both heads over the vocabulary, see `linear_cross_entropy`.

    Shape:
        labels: (M,); returns a scalar in fp32 or wider

    Raises:
        ShapeError: the heads differ in vocabulary size, or the models in the number of tokens.
        ConfigError: the temperature is not above 0.

    Memory: one chunk of logits of both heads, and one fp32 gradient the size of the student's
    weight. Source: Hinton et al., "Distilling the knowledge in a neural network" (2015).
    """
    _check(student, teacher, temperature)
    if not torch.is_grad_enabled():
        student = student.detach()
    if num_items is None:
        num_items = (labels != IGNORE_INDEX).sum().clamp(min=1)
    labeled = find_labeled(labels)
    if labeled is not None:
        labels = labels[labeled]
        student, teacher = student.select(labeled), teacher.select(labeled)
    hidden, weight, bias, added, softcap = student
    wide = accumulation_dtype(hidden.dtype)
    scale = 1.0 / as_number(num_items, hidden.device, wide)
    teaching = _DistillationArgs(teacher.detach(), temperature, vocab, softcap)
    flat = itertools.chain.from_iterable(added)
    is_counted = labels != IGNORE_INDEX
    return _LinearDistillation.apply(hidden, weight, bias, is_counted, scale, teaching, *flat)


def _check(student: HeadInput, teacher: HeadInput, temperature: float) -> None:
    if not temperature > 0:
        raise ConfigError(f"temperature={temperature} must be above 0.")
    student_size, teacher_size = student.weight.shape[0], teacher.weight.shape[0]
    if student_size != teacher_size:
        raise ShapeError(
            f"the vocabulary of the student has {student_size} tokens, but the vocabulary of the "
            f"teacher has {teacher_size}. Use models with the same vocabulary."
        )
    student_size, teacher_size = student.hidden.shape[0], teacher.hidden.shape[0]
    if student_size != teacher_size:
        raise ShapeError(
            f"the student predicts {student_size} tokens, but the teacher predicts {teacher_size}. "
            "Pass the same batch to both models."
        )

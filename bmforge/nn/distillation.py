"""How far a student's predictions are from a teacher's, straight from hidden states.

As in `losses.py` the full logits of neither exist: some tokens, and on a CPU some columns, of both
heads go through at a time, and the student's gradient is taken while they are at hand.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bmforge.batch import IGNORE_INDEX
from bmforge.device import wide_dtype
from bmforge.errors import ConfigError, ShapeError
from bmforge.nn.cuts import VocabCut
from bmforge.nn.losses import TiledHead, TiledLogits, TiledLoss, find_tiling, split_chunks

__all__ = ["HeadInput", "linear_distillation"]


class HeadInput(NamedTuple):
    """What a head makes logits of: ``hidden @ weight.T + bias`` and the products that are added.

    Shape:
        hidden: (M, D); weight: (V, D); bias: (V,); added: (M, R) and (V, R) each
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    added: tuple[tuple[Tensor, Tensor], ...] = ()

    def detach(self) -> HeadInput:
        """Return the same without a graph."""
        bias = None if self.bias is None else self.bias.detach()
        added = tuple((low.detach(), rows.detach()) for low, rows in self.added)
        return HeadInput(self.hidden.detach(), self.weight.detach(), bias, added)


class _Teaching(NamedTuple):
    """What of a distillation wants no gradient."""

    teacher: HeadInput
    temperature: float
    vocab: VocabCut | None


class _LinearDistillation(TiledLoss):
    """Sum over tokens of KL(teacher || student) times the temperature's square and `scale`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kept: Tensor,
        scale: Tensor,
        teaching: _Teaching,
        *added: Tensor,
    ) -> Tensor:
        teacher, temperature, vocab = teaching
        columns, wide = weight.shape[0], scale.dtype
        tiling = find_tiling(hidden, weight, vocab)
        head = TiledHead(hidden, weight, bias, added, ctx.needs_input_grad, wide)
        mine = TiledLogits(head, tiling)
        flat = tuple(itertools.chain.from_iterable(teacher.added))
        no_grads = (False,) * (6 + len(flat))
        theirs = TiledLogits(
            TiledHead(teacher.hidden, teacher.weight, teacher.bias, flat, no_grads, wide), tiling
        )
        total = torch.zeros_like(scale)
        for start, count in split_chunks(hidden.shape[0], tiling.tokens):
            tokens = slice(start, start + count)
            pair = _Pair(kept[tokens], vocab, wide, temperature)
            for first, size in split_chunks(columns, tiling.columns):
                made = theirs.make(tokens, first, size)
                pair.add_(mine.make(tokens, first, size), made, first)
            total += pair.finish()
            if not any(ctx.needs_input_grad):
                continue
            for first, size in split_chunks(columns, tiling.columns):
                tile, other = (one.again(tokens, first, size) for one in (mine, theirs))
                pair.differentiate_(tile, other, first, is_exponential=tiling.keeps)
                head.collect_(mine.narrow(tile, scale), tokens, slice(first, first + size))
            head.finish_tokens_(tokens)
        TiledLoss.keep_(ctx, head, scale, (hidden, weight, bias, *added))
        return total * scale


class _Pair:
    """Loss and gradient of some tokens, whose logits of both heads come tile by tile.

    With z of the teacher, y of the student, both over the temperature, and p the teacher's
    softmax, the loss is ``sum p (z - y) - logsumexp z + logsumexp y``; sums run along as in
    `losses._Softmax`.
    """

    def __init__(
        self, kept: Tensor, vocab: VocabCut | None, wide: torch.dtype, temperature: float
    ) -> None:
        self._vocab, self._kept, self._temperature = vocab, kept[:, None], temperature
        shape = {"size": (2, *self._kept.shape), "dtype": wide, "device": kept.device}
        # Of the student and of the teacher.
        self._top = torch.full(fill_value=torch.finfo(wide).min, **shape)
        self._mass = torch.zeros(**shape)
        self._cross = torch.zeros_like(self._mass[0])
        self._tops: dict[int, Tensor] = {}

    def add_(self, mine: Tensor, theirs: Tensor, first: int) -> None:
        """Count a tile, the columns from `first` on; both become exponentials."""
        mine.div_(self._temperature)
        theirs.div_(self._temperature)
        gap = theirs - mine
        top = torch.stack((mine.amax(-1, keepdim=True), theirs.amax(-1, keepdim=True)))
        top = torch.maximum(self._top, top)
        mine.sub_(top[0]).exp_()
        theirs.sub_(top[1]).exp_()
        # What the teacher rules out counts nothing, even where the student does as well (-inf).
        gap.mul_(theirs).masked_fill_(theirs == 0, 0)
        before = (self._top - top).exp_()
        sums = torch.stack((mine.sum(-1, keepdim=True), theirs.sum(-1, keepdim=True)))
        self._mass = self._mass * before + sums
        self._cross = self._cross * before[1] + gap.sum(-1, keepdim=True)
        self._top = self._tops[first] = top

    def finish(self) -> Tensor:
        """Return the summed loss of all tiles, on all processes."""
        if self._vocab is not None:
            top = self._vocab.max_(self._top.clone())
            change = (self._top - top).exp_()
            sums = torch.cat((self._mass * change, (self._cross * change[1])[None]))
            sums = self._vocab.sum_(sums)
            self._mass, self._cross, self._top = sums[:2], sums[2], top
        mine, theirs = (self._mass.log() + self._top).unbind()
        found = self._cross / self._mass[1] + (mine - theirs)
        return found.where(self._kept, 0).sum() * self._temperature**2

    def differentiate_(
        self, mine: Tensor, theirs: Tensor, first: int, is_exponential: bool
    ) -> None:
        """Turn the student's tile into the gradient of its logits."""
        share = self._kept * self._temperature / self._mass
        for tile, top, whole, part in zip(
            (mine, theirs), self._tops[first], self._top, share, strict=True
        ):
            if is_exponential:
                tile.mul_((top - whole).exp_().mul_(part))
            else:
                tile.div_(self._temperature).sub_(whole).exp_().mul_(part)
        mine.sub_(theirs)


def linear_distillation(
    student: HeadInput,
    teacher: HeadInput,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    num_items: float | Tensor | None = None,
    vocab: VocabCut | None = None,
) -> Tensor:
    """KL(teacher || student) of next-token predictions, times T^2, without any full logits.

    Args:
        student: what its head makes logits of; it gets the gradients.
        teacher: what the teacher's head does, of the same tokens and the same vocabulary, cut over
            processes alike.
        labels: rows with -100 count nothing; the rest is not looked at.
        temperature: T, which both logits are divided by.
        num_items: what the sum over rows is divided by; None divides by the number of labels.
        vocab: how the rows of both heads are divided over processes, as in `linear_cross_entropy`.

    Shape:
        labels: (M,); returns a scalar in fp32 or wider

    Raises:
        ShapeError: the heads have other rows, or the hidden states are of other tokens.
        ConfigError: the temperature is not above 0.

    Memory: some logits of both heads, and one gradient the size of the student's weight in fp32.
    Source: Hinton et al., "Distilling the knowledge in a neural network" (2015).
    """
    _check(student, teacher, temperature)
    if not torch.is_grad_enabled():
        student = student.detach()
    if num_items is None:
        num_items = (labels != IGNORE_INDEX).sum().clamp(min=1)
    hidden, weight, bias, added = student
    wide = wide_dtype(hidden.dtype)
    scale = 1.0 / torch.as_tensor(num_items, dtype=wide, device=hidden.device)
    teaching = _Teaching(teacher.detach(), temperature, vocab)
    flat = itertools.chain.from_iterable(added)
    kept = labels != IGNORE_INDEX
    return _LinearDistillation.apply(hidden, weight, bias, kept, scale, teaching, *flat)


def _check(student: HeadInput, teacher: HeadInput, temperature: float) -> None:
    if not temperature > 0:
        raise ConfigError(f"temperature={temperature} must be above 0.")
    mine, theirs = student.weight.shape[0], teacher.weight.shape[0]
    if mine != theirs:
        raise ShapeError(
            f"the student's head has {mine} rows, the teacher's {theirs}. They must predict the "
            "same vocabulary."
        )
    mine, theirs = student.hidden.shape[0], teacher.hidden.shape[0]
    if mine != theirs:
        raise ShapeError(
            f"the student predicts {mine} tokens, the teacher {theirs}. Give both the same batch."
        )

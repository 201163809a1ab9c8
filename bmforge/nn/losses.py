"""Cross-entropy straight from hidden states: the full logits never exist.

The head of a language model makes N x V logits; for 8,192 tokens and a vocabulary of 128k that is 4
GiB in fp32, several times over in a plain implementation. Here some tokens go through at a time,
and on a CPU some columns as well, in memory that is made once; their gradient is taken while their
logits are at hand. Where even a few tokens' logits of a large vocabulary are too many to keep, one
pass over the columns finds the softmax's sums and a second one makes the logits again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bmforge.batch import IGNORE_INDEX
from bmforge.device import is_host, reads_are_free, wide_dtype
from bmforge.errors import ShapeError
from bmforge.nn.cuts import Rows, VocabCut

__all__ = [
    "TiledHead",
    "TiledLogits",
    "TiledLoss",
    "Tiling",
    "check_classes",
    "find_tiling",
    "linear_cross_entropy",
    "split_chunks",
]

# Logits in flight, 256 MiB in fp32: an accelerator wants large products.
_CHUNK_ELEMENTS = 1 << 26
# A host multiplies faster in tiles that stay in its cache (16 MiB), and 144 MiB of them are kept;
# but each pass over the head's rows is to serve some tokens.
_HOST_CHUNK_ELEMENTS, _HOST_TILE_ELEMENTS, _FEW_TOKENS, _MANY_TOKENS = 9 << 22, 1 << 22, 200, 2048
# Rows that are added to others of a wider dtype at a time, so that they stay in its cache as well.
_WIDENED_ROWS = 512


class Tiling(NamedTuple):
    """How many tokens and columns go through at a time, and if all columns' logits are kept."""

    tokens: int
    columns: int
    keeps: bool


def find_tiling(hidden: Tensor, weight: Rows, vocab: VocabCut | None) -> Tiling:
    """Return the tiles of these tokens and of the columns that are here.

    Args:
        hidden: the tokens.
        weight: the head's rows; of those that become numbers when they are sliced no more are
            taken at a time than they say.
        vocab: how they are divided: all processes take equally many chunks of tokens.
    """
    count, columns = max(1, hidden.shape[0]), weight.shape[0]
    widest = columns if vocab is None else vocab.width
    most = getattr(weight, "rows_at_once", columns)
    if not is_host(hidden.device) or torch.compiler.is_compiling():
        tokens = min(count, max(1, _CHUNK_ELEMENTS // widest))
        return Tiling(tokens, min(columns, most), keeps=True)
    tokens = min(count, _HOST_CHUNK_ELEMENTS // widest)
    keeps = tokens >= min(count, _FEW_TOKENS)
    tokens = tokens if keeps else min(count, _MANY_TOKENS)
    tokens = -(-count // -(-count // tokens))  # as many in every chunk
    return Tiling(tokens, min(columns, most, max(1, _HOST_TILE_ELEMENTS // tokens)), keeps)


def split_chunks(count: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield where every chunk of `count` things begins and how long it is; one at least."""
    for start in range(0, max(1, count), size):
        yield start, min(size, count - start)


class TiledLoss(torch.autograd.Function):
    """A loss whose gradients are made in forward, tile by tile.

    Its arguments are hidden states, rows, their bias, three that want no gradient, and by turns
    narrower states and rows that are added.
    """

    @staticmethod
    def keep_(ctx: Any, head: TiledHead, scale: Tensor, inputs: Sequence[Tensor | None]) -> None:
        """Keep the gradients of `inputs` until backward, where they are multiplied by `scale`."""
        like = head.pairs[0][0]
        left = torch.ones_like(scale) if like.dtype == torch.float16 else scale
        ctx.save_for_backward(*head.grads, left)
        ctx.dtypes = [like.dtype if tensor is None else tensor.dtype for tensor in inputs]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *sums, scale = ctx.saved_tensors
        factor = grads[0] * scale
        found = [_scale_(g, factor, dtype) for g, dtype in zip(sums, ctx.dtypes, strict=True)]
        return *found[:3], None, None, None, *found[3:]


class _LinearCrossEntropy(TiledLoss):
    """Sum of token losses times `scale`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Rows,
        bias: Tensor | None,
        labels: Tensor,
        scale: Tensor,
        vocab: VocabCut | None,
        *added: Tensor,
    ) -> Tensor:
        columns, tiling = weight.shape[0], find_tiling(hidden, weight, vocab)
        head = TiledHead(hidden, weight, bias, added, ctx.needs_input_grad, scale.dtype)
        logits = TiledLogits(head, tiling)
        total = torch.zeros_like(scale)
        for start, count in split_chunks(hidden.shape[0], tiling.tokens):
            tokens = slice(start, start + count)
            softmax = _Softmax(labels[tokens], vocab, scale.dtype)
            for first, size in split_chunks(columns, tiling.columns):
                softmax.add_(logits.make(tokens, first, size), first)
            total += softmax.finish()
            if not any(ctx.needs_input_grad):
                continue
            for first, size in split_chunks(columns, tiling.columns):
                tile = logits.again(tokens, first, size)
                softmax.differentiate_(tile, first, is_exponential=tiling.keeps)
                head.collect_(logits.narrow(tile, scale), tokens, slice(first, first + size))
            head.finish_tokens_(tokens)
        TiledLoss.keep_(ctx, head, scale, (hidden, weight, bias, *added))
        return total * scale


class TiledHead:
    """What makes logits, and the gradients that it wants.

    Args:
        hidden: states (M, D).
        weight: (V, D).
        bias: (V,).
        added: narrower states (M, R) and rows (V, R) by turns, whose products are added.
        needs: which of `hidden`, `weight`, `bias`, three others and `added` want a gradient.
        wide: what gradients are summed in.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        added: Sequence[Tensor],
        needs: Sequence[bool],
        wide: torch.dtype,
    ) -> None:
        self.bias, self.wide = bias, wide
        self.pairs = [(hidden, weight), *zip(added[::2], added[1::2], strict=True)]
        wanted = [*needs[:2], *needs[6:]]
        self._of_states = [
            torch.empty_like(states) if need else None
            for (states, _), need in zip(self.pairs, wanted[::2], strict=True)
        ]
        self._of_rows = [
            torch.empty_like(rows, dtype=wide) if need else None
            for (_, rows), need in zip(self.pairs, wanted[1::2], strict=True)
        ]
        wants_bias = needs[2] and bias is not None
        self._of_bias = torch.zeros_like(bias, dtype=wide) if wants_bias else None
        # Of the tokens at hand, summed over tiles.
        self._sums: list[Tensor | None] = [None] * len(self.pairs)

    @property
    def grads(self) -> list[Tensor | None]:
        """Of the states, the weight, the bias and what is added."""
        pairs = list(zip(self._of_states, self._of_rows, strict=True))
        return [*pairs[0], self._of_bias, *itertools.chain.from_iterable(pairs[1:])]

    def score_(self, out: Tensor, tokens: slice, columns: slice) -> Tensor:
        """Write the logits of some tokens and columns into `out`, and return it."""
        (hidden, weight), *added = self.pairs
        torch.mm(hidden[tokens], weight[columns].t(), out=out)
        if self.bias is not None:
            out += self.bias[columns]
        for low, rows in added:
            out.addmm_(low[tokens], rows[columns].t())
        return out

    def collect_(self, grad: Tensor, tokens: slice, columns: slice) -> None:
        """Add what the gradient of some logits gives."""
        for number, (states, rows) in enumerate(self.pairs):
            of_states, of_rows = self._of_states[number], self._of_rows[number]
            if of_states is not None:
                is_first = self._sums[number] is None
                if is_first:
                    self._sums[number] = self._room(of_states[tokens])
                _add_product_(self._sums[number], grad, rows[columns], is_first)
            if of_rows is not None:
                _add_product_(of_rows[columns], grad.t(), states[tokens], tokens.start == 0)
        if self._of_bias is not None:
            self._of_bias[columns] += grad.sum(0, dtype=self.wide)

    def _room(self, part: Tensor) -> Tensor:
        """Return where the gradient of some states is summed: in place where it is wide."""
        return part if part.dtype == self.wide else torch.empty_like(part, dtype=self.wide)

    def finish_tokens_(self, tokens: slice) -> None:
        """Go on to other tokens."""
        for number, (found, whole) in enumerate(zip(self._sums, self._of_states, strict=True)):
            if found is not None and whole is not None and found.dtype != whole.dtype:
                whole[tokens] = found
            self._sums[number] = None


class TiledLogits:
    """Tiles of logits in the same memory for all tokens: fresh pages cost a tenth of a product."""

    def __init__(self, head: TiledHead, tiling: Tiling) -> None:
        hidden, weight = head.pairs[0]
        self._head, self._tiling = head, tiling
        tiles = -(-weight.shape[0] // tiling.columns) if tiling.keeps else 1
        size = tiling.tokens * tiling.columns
        self._wide = hidden.new_empty((tiles, size), dtype=head.wide)
        self._narrow: Tensor | None = None
        if hidden.dtype != head.wide:
            self._narrow = hidden.new_empty((size,))

    def make(self, tokens: slice, first: int, size: int) -> Tensor:
        """Return the logits of some tokens and `size` columns, in the wide dtype."""
        tile, columns = self._room(tokens, first, size), slice(first, first + size)
        if self._narrow is None:
            return self._head.score_(tile, tokens, columns)
        made = self._head.score_(self._narrow[: tile.numel()].view_as(tile), tokens, columns)
        return tile.copy_(made)

    def again(self, tokens: slice, first: int, size: int) -> Tensor:
        """Return what was left in a tile that is kept; else make it anew."""
        make = self._room if self._tiling.keeps else self.make
        return make(tokens, first, size)

    def _room(self, tokens: slice, first: int, size: int) -> Tensor:
        """Return a tile's memory."""
        count = tokens.stop - tokens.start
        number = first // self._tiling.columns if self._tiling.keeps else 0
        return self._wide[number, : count * size].view(count, size)

    def narrow(self, tile: Tensor, scale: Tensor) -> Tensor:
        """Return a tile in the dtype of products."""
        if self._narrow is None:
            return tile
        out = self._narrow[: tile.numel()].view_as(tile)
        # fp16 takes the scale here, while the values are wide: most of them are far below its
        # smallest number, and a loss scale must reach them in time.
        return torch.mul(tile, scale, out=out) if out.dtype == torch.float16 else out.copy_(tile)


class _Softmax:
    """Loss and gradient of some tokens, whose logits come tile by tile.

    Source: the running maximum and sum are those of Milakov and Gimelshein, Online normalizer
    calculation for softmax (2018).
    """

    def __init__(self, target: Tensor, vocab: VocabCut | None, wide: torch.dtype) -> None:
        self._vocab = vocab
        self._kept = (target != IGNORE_INDEX)[:, None]
        target = target[:, None] if vocab is None else target[:, None] - vocab.first
        self._target = target.where(self._kept, -1)
        shape = {"size": self._kept.shape, "dtype": wide, "device": target.device}
        # The lowest number, not -inf: a column may be -inf, and so may all of a tile.
        self._top = torch.full(fill_value=torch.finfo(wide).min, **shape)
        self._mass, self._picked = torch.zeros(**shape), torch.zeros(**shape)
        self._tops: dict[int, Tensor] = {}

    def add_(self, logits: Tensor, first: int) -> None:
        """Count a tile, the columns from `first` on; it becomes exponentials."""
        index, here = self._find(logits, first)
        self._picked += logits.gather(1, index).where(here, 0)
        top = torch.maximum(self._top, logits.amax(-1, keepdim=True))
        # One exponential and in place: `torch.logsumexp` costs as much as a small product.
        found = logits.sub_(top).exp_().sum(-1, keepdim=True)
        self._mass = self._mass * (self._top - top).exp_() + found
        self._top = self._tops[first] = top

    def finish(self) -> Tensor:
        """Return the summed loss of all tiles, on all processes."""
        if self._vocab is not None:
            top = self._vocab.max_(self._top.clone())
            sums = torch.stack((self._mass * (self._top - top).exp_(), self._picked))
            self._mass, self._picked = self._vocab.sum_(sums).unbind()
            self._top = top
        return ((self._mass.log() + self._top - self._picked).where(self._kept, 0)).sum()

    def differentiate_(self, tile: Tensor, first: int, is_exponential: bool) -> None:
        """Turn a tile, as `add_` left it or logits again, into the gradient of its logits."""
        share = self._kept / self._mass
        if is_exponential:
            tile.mul_((self._tops[first] - self._top).exp_().mul_(share))
        else:
            tile.sub_(self._top).exp_().mul_(share)
        index, here = self._find(tile, first)
        tile.scatter_add_(1, index, -here.to(tile.dtype))

    def _find(self, tile: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Return which column of a tile each token's target is, and if it is one of them."""
        index = self._target - first
        here = (index >= 0) & (index < tile.shape[1]) & self._kept
        return index.where(here, 0), here


def _add_product_(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """``total += left @ right``, summed in `total`'s wider dtype; the `first` overwrites."""
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, beta=0 if first else 1, out=total)
    elif first:
        total.copy_(left @ right)
    else:
        found = left @ right
        for start in range(0, total.shape[0], _WIDENED_ROWS):
            total[start : start + _WIDENED_ROWS] += found[start : start + _WIDENED_ROWS]


def _scale_(gradient: Tensor | None, factor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Scale in the wide dtype, so that fp16 neither under- nor overflows; in place if it is wide.

    A second backward through the same graph therefore raises torch's error about in-place changes.
    """
    return None if gradient is None else gradient.to(factor.dtype).mul_(factor).to(dtype)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Rows,
    labels: Tensor,
    bias: Tensor | None = None,
    num_items: float | Tensor | None = None,
    vocab: VocabCut | None = None,
    added: Sequence[tuple[Tensor, Tensor]] = (),
) -> Tensor:
    """Cross-entropy of ``hidden @ weight.T + bias`` against `labels`, without the full logits.

    Args:
        hidden: last hidden states.
        weight: the head's weight, or its rows in another form, which want no gradient.
        labels: class of every row; rows with -100 count nothing.
        bias: the head's bias.
        num_items: what the sum is divided by; None divides by the number of labels (their mean; 0
            when there is none). A trainer passes the number of labels in the whole global batch,
            divided by the loss scale when it trains in fp16, so that the scaled gradient is made
            here.
        vocab: how the rows of `weight` are divided over processes, all of which call this with the
            same hidden states and labels; the gradient of `hidden` is this process's part of it.
        added: narrower hidden states and rows, whose products are added to the logits.

    Shape:
        hidden: (M, D); weight: (V, D); labels: (M,); bias: (V,); added: (M, R) and (V, R);
        returns a scalar in fp32 or wider

    Raises:
        ShapeError: a label is neither -100 nor a class, where looking costs no waiting.

    Memory: some logits (144 MiB on a CPU), and one gradient the size of `weight` in fp32.
    Source: the idea of taking the gradient in forward is Liger Kernel's (Hsu et al. 2024).
    """
    if vocab is None:
        check_classes(labels, weight.shape[0])
    if not torch.is_grad_enabled():
        # torch tells a function what could want a gradient, not that none is being recorded.
        hidden, weight = hidden.detach(), weight.detach()
        bias = None if bias is None else bias.detach()
        added = [(low.detach(), rows.detach()) for low, rows in added]
    if num_items is None:
        num_items = (labels != IGNORE_INDEX).sum().clamp(min=1)
    wide = wide_dtype(hidden.dtype)
    scale = 1.0 / torch.as_tensor(num_items, dtype=wide, device=hidden.device)
    flat = itertools.chain.from_iterable(added)
    return _LinearCrossEntropy.apply(hidden, weight, bias, labels, scale, vocab, *flat)


def check_classes(labels: Tensor, count: int) -> None:
    """Raise `ShapeError` for labels outside of `count` classes, where looking costs no waiting."""
    if not reads_are_free(labels):
        return
    given = labels[labels != IGNORE_INDEX]
    if given.numel() and (int(given.min()) < 0 or int(given.max()) >= count):
        raise ShapeError(
            f"labels go from {int(given.min())} to {int(given.max())}; the head has {count} "
            f"classes, from 0 on. Mark what is not to be predicted with {IGNORE_INDEX}."
        )

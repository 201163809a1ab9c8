"""Tiles of a head's logits: products, buffers, and the softmax over tiles of columns.

The columns of the vocabulary may be sharded over ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bmforge.batch import IGNORE_INDEX
from bmforge.device import accumulates_in_fp32, is_host
from bmforge.nn.shard_hooks import VocabCut

__all__ = ["TiledHead", "TiledLogits", "TiledSoftmax", "Tiling"]

# On a CPU, rows per step when a product is added to a sum of a wider dtype; sized for the cache.
_WIDENED_ROWS = 512


class Tiling(NamedTuple):
    """Number of tokens and of columns per tile.

    `keeps` is True if the logits of all columns of a chunk stay in memory.
    """

    tokens: int
    columns: int
    keeps: bool


class TiledHead:
    """Inputs of a head, and buffers for their gradients.

    Args:
        hidden: hidden states, (M, D).
        weight: weight, (V, D).
        bias: bias, (V,), or None.
        added: pairs (a, b) of low-rank factors, (M, R) and (V, R), whose products ``a @ b.T``
            are added to the logits.
        needs: True for each input of `TiledLoss` that needs a gradient, in the order of the inputs.
        wide: dtype in which gradients are accumulated.
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
        self.bias, self.wide, self.needs_gradients = bias, wide, any(needs)
        self.pairs = [(hidden, weight), *zip(added[::2], added[1::2], strict=True)]
        needs_pairs = [*needs[:2], *needs[6:]]
        self._of_states = [
            torch.empty_like(states) if need else None
            for (states, _), need in zip(self.pairs, needs_pairs[::2], strict=True)
        ]
        self._of_rows = [
            torch.empty_like(rows, dtype=wide) if need else None
            for (_, rows), need in zip(self.pairs, needs_pairs[1::2], strict=True)
        ]
        wants_bias = needs[2] and bias is not None
        self._of_bias = torch.zeros_like(bias, dtype=wide) if wants_bias else None
        # Gradients of the current tokens' hidden states, summed over tiles.
        self._sums: list[Tensor | None] = [None] * len(self.pairs)

    @property
    def grads(self) -> list[Tensor | None]:
        """Gradients of hidden states, weight, bias and the low-rank factors in `added`."""
        pairs = list(zip(self._of_states, self._of_rows, strict=True))
        return [*pairs[0], self._of_bias, *itertools.chain.from_iterable(pairs[1:])]

    def score_(self, out: Tensor, tokens: slice, columns: slice) -> Tensor:
        """Write the logits of the given tokens and columns into `out`, and return `out`."""
        (hidden, weight), *added = self.pairs
        torch.mm(hidden[tokens], weight[columns].t(), out=out)
        if self.bias is not None:
            out += self.bias[columns]
        for low, rows in added:
            out.addmm_(low[tokens], rows[columns].t())
        return out

    def collect_(self, grad: Tensor, tokens: slice, columns: slice) -> None:
        """Accumulate the gradients of the inputs from the gradient of a tile of logits."""
        for number, (states, rows) in enumerate(self.pairs):
            of_states, of_rows = self._of_states[number], self._of_rows[number]
            if of_states is not None:
                is_first = self._sums[number] is None
                if is_first:
                    self._sums[number] = self._sum_buffer(of_states[tokens])
                _add_product_(self._sums[number], grad, rows[columns], is_first)
            if of_rows is not None:
                _add_product_(of_rows[columns], grad.t(), states[tokens], tokens.start == 0)
        if self._of_bias is not None:
            self._of_bias[columns] += grad.sum(0, dtype=self.wide)

    def cut_(self, rows: int) -> None:
        """Drop the gradients of padded rows of the weight, the bias and the low-rank factors."""
        self._of_rows = [None if grad is None else grad[:rows] for grad in self._of_rows]
        self._of_bias = None if self._of_bias is None else self._of_bias[:rows]

    def _sum_buffer(self, part: Tensor) -> Tensor:
        """Return a buffer for summing a gradient: the gradient's tensor itself if it is wide."""
        return part if part.dtype == self.wide else torch.empty_like(part, dtype=self.wide)

    def finish_tokens_(self, tokens: slice) -> None:
        """Convert the summed gradients of these tokens to their final dtype; reset the sums."""
        for number, (total, gradient) in enumerate(zip(self._sums, self._of_states, strict=True)):
            if gradient is not None and total is None:
                gradient[tokens] = 0  # no tile: this rank's shard of the vocabulary is empty
            elif gradient is not None and total is not None and total.dtype != gradient.dtype:
                gradient[tokens] = total
            self._sums[number] = None


def _add_product_(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """Accumulate ``total += left @ right`` in the wider dtype of `total`; `first` overwrites."""
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, beta=0 if first else 1, out=total)
    elif accumulates_in_fp32(total.device):
        beta = 0 if first else 1
        torch.addmm(total, left, right, out_dtype=total.dtype, beta=beta, out=total)
    elif first:
        total.copy_(left @ right)
    else:
        product = left @ right
        step = _WIDENED_ROWS if is_host(total.device) else max(1, total.shape[0])
        for start in range(0, total.shape[0], step):
            total[start : start + step] += product[start : start + step]


class TiledLogits:
    """Buffers for tiles of logits, reused for all tokens to avoid page faults.

    Args:
        head: the head's inputs.
        tiling: sizes of the tiles; with a cap, `keeps` must be False.
        softcap: cap c of the logits z, which become ``c * tanh(z / c)``; None means no cap.

    Attributes:
        keeps_exponentials: True if `reload` returns what the caller left in the tile, which
            `TiledSoftmax.add_` overwrites with exponentials; False if it returns logits.
    """

    def __init__(self, head: TiledHead, tiling: Tiling, softcap: float | None = None) -> None:
        hidden, weight = head.pairs[0]
        self._head, self._tiling, self._softcap = head, tiling, softcap
        # Derivative of the cap in the last tile.
        self._slope: Tensor | None = None
        # A rank whose shard of the vocabulary is empty has no tiles.
        count = -(-weight.shape[0] // max(1, tiling.columns)) if tiling.keeps else 1
        size = tiling.tokens * tiling.columns
        is_narrow = hidden.dtype != head.wide
        # 16-bit logits are kept instead of their wide exponentials: 72 MiB less, for one more
        # exponential per logit.
        self.keeps_exponentials = tiling.keeps and not (is_narrow and count > 1)
        tile_dtype = hidden.dtype if is_narrow and not self.keeps_exponentials else head.wide
        self._number = 0  # index of the last tile
        wide_count = count if tile_dtype == head.wide else 1
        self._wide = hidden.new_empty((wide_count, size), dtype=head.wide)
        self._narrow: Tensor | None = None
        if is_narrow:
            self._narrow = hidden.new_empty((count if tile_dtype == hidden.dtype else 1, size))

    def make(self, tokens: slice, first: int, size: int) -> Tensor:
        """Compute the logits of the given tokens and `size` columns, in the wide dtype."""
        tile, narrow = self._find(tokens, first, size)
        columns = slice(first, first + size)
        if narrow is None:
            self._head.score_(tile, tokens, columns)
        else:
            tile.copy_(self._head.score_(narrow, tokens, columns))
        if self._softcap is not None:
            tile.div_(self._softcap).tanh_()
            self._slope = 1 - tile.square()
            tile.mul_(self._softcap)
        return tile

    def reload(self, tokens: slice, first: int, size: int) -> Tensor:
        """Return a stored tile (see `keeps_exponentials`), or compute its logits again."""
        if not self._tiling.keeps:
            return self.make(tokens, first, size)
        tile, narrow = self._find(tokens, first, size)
        if not self.keeps_exponentials and narrow is not None:
            tile.copy_(narrow)
        return tile

    def _find(self, tokens: slice, first: int, size: int) -> tuple[Tensor, Tensor | None]:
        """Return a tile's buffers in the wide and the narrow dtype; tiles may share buffers."""
        shape = tokens.stop - tokens.start, size
        self._number = first // self._tiling.columns if self._tiling.keeps else 0
        narrow = None if self._narrow is None else self._view(self._narrow, shape)
        return self._view(self._wide, shape), narrow

    def _view(self, buffers: Tensor, shape: tuple[int, int]) -> Tensor:
        buffer = buffers[self._number if buffers.shape[0] > 1 else 0]
        return buffer[: shape[0] * shape[1]].view(shape)

    def narrow(self, tile: Tensor, scale: Tensor) -> Tensor:
        """Return the last tile's gradient times `scale`, in the dtype of the matrix products."""
        if self._slope is not None:
            tile.mul_(self._slope)
        if self._narrow is None:
            return tile
        out = self._view(self._narrow, (tile.shape[0], tile.shape[1]))
        # fp16: apply the scale here, in the wide dtype. Most values are far below fp16's smallest
        # number and would be rounded to zero before the loss scale is applied.
        return torch.mul(tile, scale, out=out) if out.dtype == torch.float16 else out.copy_(tile)


class TiledSoftmax:
    """Cross-entropy of a chunk of tokens and its gradient, computed from tiles of logits.

    Args:
        target: labels; -100 ignores the token.
        vocab: sharding of the columns over ranks; None if they are not sharded.
        wide: dtype of the sums.

    Source: the running maximum and sum are those of Milakov and Gimelshein, "Online normalizer
    calculation for softmax" (2018).
    """

    def __init__(self, target: Tensor, vocab: VocabCut | None, wide: torch.dtype) -> None:
        self._vocab = vocab
        self._kept = (target != IGNORE_INDEX)[:, None]
        target = target[:, None] if vocab is None else target[:, None] - vocab.first
        self._target = target.where(self._kept, -1)
        shape = {"size": self._kept.shape, "dtype": wide, "device": target.device}
        # The smallest number, not -inf: a whole tile may be -inf, and -inf - -inf is NaN.
        self._top = torch.full(fill_value=torch.finfo(wide).min, **shape)
        self._mass, self._picked = torch.zeros(**shape), torch.zeros(**shape)
        self._tops: dict[int, Tensor] = {}

    @property
    def is_kept(self) -> Tensor:
        """Mask of the tokens with a label other than -100, (M, 1)."""
        return self._kept

    def add_(self, logits: Tensor, first: int) -> None:
        """Accumulate the tile whose first column is `first`; overwrite it with exponentials."""
        index, is_inside = self.find(logits, first)
        self._picked += logits.gather(1, index).where(is_inside, 0)
        top = torch.maximum(self._top, logits.amax(-1, keepdim=True))
        # One exponential and in place: `torch.logsumexp` costs as much as a small product.
        mass = logits.sub_(top).exp_().sum(-1, keepdim=True)
        self._mass = self._mass * (self._top - top).exp_() + mass
        self._top = self._tops[first] = top

    def finish(self) -> Tensor:
        """Return the cross-entropy summed over all tiles and ranks."""
        if self._vocab is not None:
            top = self._vocab.max_(self._top.clone())
            sums = torch.stack((self._mass * (self._top - top).exp_(), self._picked))
            self._mass, self._picked = self._vocab.sum_(sums).unbind()
            self._top = top
        return ((self._mass.log() + self._top - self._picked).where(self._kept, 0)).sum()

    def differentiate_(self, tile: Tensor, first: int, is_exponential: bool) -> None:
        """Overwrite a tile (exponentials from `add_`, or logits) with the gradient of the loss."""
        weight = self._kept / self._mass
        if is_exponential:
            tile.mul_((self._tops[first] - self._top).exp_().mul_(weight))
        else:
            tile.sub_(self._top).exp_().mul_(weight)
        index, is_inside = self.find(tile, first)
        tile.scatter_add_(1, index, -is_inside.to(tile.dtype))

    def find(self, tile: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Return each token's target column in a tile, and a mask of targets inside the tile."""
        index = self._target - first
        is_inside = (index >= 0) & (index < tile.shape[1]) & self._kept
        return index.where(is_inside, 0), is_inside

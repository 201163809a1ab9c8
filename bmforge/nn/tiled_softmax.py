"""Softmax cross-entropy over tiles of vocabulary columns, which may be sharded over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from bmforge.batch import IGNORE_INDEX
from bmforge.nn.shard_hooks import VocabCut

__all__ = ["TiledSoftmax"]


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

"""Buffers for tiles of logits, which the losses compute from hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from bmforge.nn.losses import TiledHead, Tiling

__all__ = ["TiledLogits"]


class TiledLogits:
    """Buffers for tiles of logits, reused for all tokens to avoid page faults.

    Args:
        head: the head's inputs.
        tiling: sizes of the tiles; with a cap no tiles are stored.
        softcap: cap c of the logits z, which become ``c * tanh(z / c)``; None means no cap.

    Attributes:
        keeps_exponentials: True if `again` returns what the caller left in the tile, which
            `TiledSoftmax.add_` overwrites with exponentials; False if it returns logits.
    """

    def __init__(self, head: TiledHead, tiling: Tiling, softcap: float | None = None) -> None:
        hidden, weight = head.pairs[0]
        self._head, self._tiling, self._softcap = head, tiling, softcap
        # Derivative of the cap in the last tile.
        self._slope: Tensor | None = None
        count = -(-weight.shape[0] // tiling.columns) if tiling.keeps else 1
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

    def again(self, tokens: slice, first: int, size: int) -> Tensor:
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

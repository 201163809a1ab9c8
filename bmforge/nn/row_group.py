"""Several low-rank parts beside one layer, each for some rows of a batch, as two products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bmforge.nn.low_rank import LowRank
from bmforge.nn.part import BesidePart, NoRows

__all__ = ["RowGroup", "group_rows_"]


class RowGroup:
    """The factors of every row, side by side; only for calls without gradients.

    Args:
        parts: beside one layer.
        rows: of each part, the rows that it works on.
        count: of rows in the batch.

    Memory: two thin matrices for every row.
    """

    def __init__(self, parts: Sequence[LowRank], rows: Sequence[Sequence[int]], count: int) -> None:
        first, rank = parts[0], max(part.down.shape[0] for part in parts)
        self.down = first.down.new_zeros(count, first.down.shape[1], rank)
        self.up = first.up.new_zeros(count, rank, first.up.shape[0])
        for part, own in zip(parts, rows, strict=True):
            index = torch.tensor(own, device=first.down.device)
            size = part.down.shape[0]
            self.down[index, :, :size] = part.down.detach().t() * (part.scale * part.share)
            self.up[index, :size] = part.up.detach().t()

    def join(self, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
        """Add what each row's part makes of it."""
        low = torch.bmm(inputs[0].to(self.down.dtype), self.down)
        if out.dtype == low.dtype:
            return torch.baddbmm(out, low, self.up)
        return out + torch.bmm(low, self.up).to(out.dtype)


def group_rows_(parts: Sequence[BesidePart], rows: Sequence[Sequence[int]], count: int) -> None:
    """Let parts beside one layer be one group where that is the same.

    Args:
        parts: that work on rows, all that the layer has beside it.
        rows: of each.
        count: of rows in the batch.
    """
    plain = [part for part in parts if _is_plain(part)]
    if len(plain) < 2 or len(plain) < len(parts):
        return
    first, *others = plain
    first.group = RowGroup(plain, rows, count)  # type: ignore[arg-type]
    for part in others:
        part.group = NoRows


def _is_plain(part: BesidePart) -> bool:
    return (
        type(part) is LowRank
        and part.magnitude is None
        and part.bias is None
        and not (part.dropout and part.training)
        and type(part.down) is torch.nn.Parameter
    )

"""Changing a matrix column by column, the later ones making up for what the earlier ones lose.

What GPTQ and SparseGPT share: they differ in what becomes of a column.

Source: Frantar et al., "GPTQ" (2022), algorithm 1; Frantar and Alistarh, "SparseGPT" (2023).
Inputs that no text has reached are not set to zero: damping makes them cheap, and nobody makes up
for them.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from bmforge.compress.statistics import Hessian
from bmforge.device import wide_dtype

__all__ = ["Settler", "settle_columns"]


class Settler(Protocol):
    """Says what becomes of columns."""

    def settle(self, number: int, block: Tensor, place: int, roots: Tensor) -> Tensor:
        """Return what becomes of a column, the first time it is seen.

        Args:
            number: of the column in the matrix.
            block: columns that are looked at together, as they are by now.
            place: of this one among them; those before are settled.
            roots: for each the root of its entry of the inverse Hessian, the columns before it
                left out.

        Shape:
            block: (rows, columns of the block); roots: (columns of the block,); returns (rows,)
        """


def settle_columns(
    matrix: Tensor,
    hessian: Hessian,
    settler: Settler,
    *,
    damp: float,
    block_columns: int,
    name: str,
    in_place: bool = False,
) -> Tensor:
    """Return the matrix with every column settled.

    Args:
        matrix: (rows, columns).
        hessian: of what goes in.
        settler: says what becomes of a column.
        damp: share of the mean of the Hessian's diagonal that is added to it.
        block_columns: columns after which the rest is brought up to date.
        name: of the matrix, for messages.
        in_place: the matrix itself may be used up; it is where it is wide enough to be worked on.

    Raises:
        ConfigError: the Hessian is not positive; the matrix is as it was then.
    """
    wide = wide_dtype(matrix.dtype)
    factor = hessian.inverse_factor(damp, name).to(wide)
    values = matrix.to(wide, copy=not in_place)
    columns = values.shape[1]
    for first in range(0, columns, block_columns):
        last = min(first + block_columns, columns)
        block, errors = values[:, first:last], values.new_empty(values.shape[0], last - first)
        inside = factor[first:last, first:last]
        roots = inside.diagonal()
        for place in range(last - first):
            settled = settler.settle(first + place, block, place, roots).to(wide)
            error = (block[:, place] - settled) / roots[place]
            block[:, place] = settled
            block[:, place + 1 :].addr_(error, inside[place, place + 1 :], alpha=-1)
            errors[:, place] = error
        values[:, last:].addmm_(errors, factor[first:last, last:], alpha=-1)
    return values

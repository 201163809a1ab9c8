"""Updates a matrix column by column; later columns compensate for earlier columns' errors.

GPTQ and SparseGPT share this procedure; they differ in the new value of a column.

Source: Frantar et al., "GPTQ" (2022), algorithm 1; Frantar and Alistarh, "SparseGPT" (2023). Unlike
in the published code, weights of inputs that are always zero in calibration are not changed. Their
rows of the Hessian contain only the damping term, so no other column compensates for their errors.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from bmforge.compress.statistics import Hessian
from bmforge.device import accumulation_dtype

__all__ = ["ColumnUpdate", "update_columns"]


class ColumnUpdate(Protocol):
    """Protocol of an object that computes the new value of a column.

    GPTQ's implementation rounds the column, SparseGPT's prunes it.
    """

    def update(self, number: int, block: Tensor, offset: int, diagonal: Tensor) -> Tensor:
        """Return the new value of a column.

        Args:
            number: index of the column in the matrix.
            block: current block of columns, including the compensation so far.
            offset: index of the column within the block; earlier columns are final.
            diagonal: entries, for the block's columns, of the diagonal of the Cholesky factor of
                the inverse Hessian.

        Shape:
            block: (rows, columns of the block); diagonal: (columns of the block,); returns (rows,)
        """


def update_columns(
    matrix: Tensor,
    hessian: Hessian,
    column_update: ColumnUpdate,
    *,
    damp: float,
    block_columns: int,
    name: str,
    in_place: bool = False,
) -> Tensor:
    """Replace every column of a matrix and compensate for its error; return the new matrix.

    Args:
        matrix: weights, (rows, columns).
        hessian: Hessian of the matrix's inputs.
        column_update: object that computes the new value of each column.
        damp: fraction of the Hessian's mean diagonal that is added to the diagonal.
        block_columns: number of columns per block; the remaining columns are updated after each
            block.
        name: name of the matrix for messages.
        in_place: compute in the matrix's own memory and overwrite it, if its dtype is at least
            fp32.

    Raises:
        ConfigError: the Hessian is not positive definite. The matrix is then unchanged.
    """
    wide = accumulation_dtype(matrix.dtype)
    factor = hessian.inverse_factor(damp, name).to(wide)
    values = matrix.to(wide, copy=not in_place)
    columns = values.shape[1]
    for first in range(0, columns, block_columns):
        last = min(first + block_columns, columns)
        block, errors = values[:, first:last], values.new_empty(values.shape[0], last - first)
        inside = factor[first:last, first:last]
        diagonal = inside.diagonal()
        for offset in range(last - first):
            new_column = column_update.update(first + offset, block, offset, diagonal).to(wide)
            error = (block[:, offset] - new_column) / diagonal[offset]
            block[:, offset] = new_column
            block[:, offset + 1 :].addr_(error, inside[offset, offset + 1 :], alpha=-1)
            errors[:, offset] = error
        values[:, last:].addmm_(errors, factor[first:last, last:], alpha=-1)
    return values

"""Products of packed matrices with many tokens: the matrix is dequantized panel by panel.

A panel is dequantized to the dtype of the product, fp32 or bf16, into a buffer that stays in the
cache, and torch multiplies it. So a bf16 product runs at the speed of torch's bf16 library, and no
dequantized copy of the whole matrix exists.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bmforge.nn.packing import PANEL_ROWS, PackedMatrix, QuantSpec
from bmforge.nn.product_kernels import Kernels

__all__ = ["Update", "multiply_by_panels", "multiply_transposed"]

# Rows (or columns) and bytes of a dequantized panel. Wider panels do not fit the cache; narrower
# ones read the activations more often: with 192 of 2,048 x 5,632, products take 1.15 times as long.
_PANEL_WIDTH, _PANEL_BYTES = 512, 8 << 20
# The width is a multiple of this, the width of the blocks of torch's library.
_STEP = 64
# Numbers between two columns of a panel: at distances of 4 KiB, all columns would have the same
# place in the nearest cache, and writing 2,048 rows of bf16 would take 1.5 times as long.
_PADDING = 32


class Update(NamedTuple):
    """Low-rank product ``scale * left @ right`` that is added to a product with a packed matrix.

    Args:
        left: one row per token, (T, R).
        right: one column per column of the result, (R, N).
        scale: factor.
    """

    left: Tensor
    right: Tensor
    scale: float = 1.0

    def add_to_(self, out: Tensor, part: slice) -> None:
        """Add the columns `part` of the product to `out`, which has only these columns."""
        torch.addmm(out, self.left, self.right[:, part], alpha=self.scale, out=out)


def multiply_by_panels(
    kernels: Kernels,
    x: Tensor,
    matrix: PackedMatrix,
    rows: int,
    spec: QuantSpec,
    bias: Tensor | None = None,
    update: Update | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return ``x @ matrix.T + bias``, with weights rounded to the dtype of x.

    Args:
        kernels: compiled kernels.
        x: activations.
        matrix: packed matrix.
        rows: number of rows of the matrix.
        spec: quantization scheme.
        bias: bias in the dtype of x, or None.
        update: product that is added, while the results of a panel are in the cache.
        out: memory for the result; if None, it is allocated.

    Shape:
        x: (T, columns) fp32 or bf16, contiguous -> (T, rows), in its dtype
    """
    columns = x.shape[1]
    out = x.new_empty(x.shape[0], rows) if out is None else out
    step = _size_at_once(rows, columns, x.dtype)
    # The kernel writes complete panels of 16 rows, also at the end of the matrix.
    buffer = x.new_empty(columns, -(-step // PANEL_ROWS) * PANEL_ROWS + _PADDING)
    for first in range(0, rows, step):
        part = slice(first, min(first + step, rows))
        kernels.unpack_part(matrix, part, slice(0, columns), spec, buffer, transposed=True)
        weight = buffer[:, : part.stop - first]
        if bias is None:
            torch.mm(x, weight, out=out[:, part])
        else:
            torch.addmm(bias[part], x, weight, out=out[:, part])
        if update is not None:
            update.add_to_(out[:, part], part)
    return out


def multiply_transposed(
    kernels: Kernels,
    grad: Tensor,
    matrix: PackedMatrix,
    rows: int,
    spec: QuantSpec,
    update: Update | None = None,
) -> Tensor:
    """Return ``grad @ matrix``, the gradient of the input of a product.

    Args:
        kernels: compiled kernels.
        grad: gradient of the product.
        matrix: packed matrix.
        rows: number of rows of the matrix.
        spec: quantization scheme.
        update: product that is added, as in `multiply_by_panels`.

    Shape:
        grad: (T, rows) fp32 or bf16 -> (T, columns), in its dtype
    """
    columns = matrix.packed.shape[1] * 32 // spec.bits
    out = grad.new_empty(grad.shape[0], columns)
    step = _size_at_once(columns, rows, grad.dtype)
    buffer = grad.new_empty(rows, step + _PADDING)
    for first in range(0, columns, step):
        part = slice(first, min(first + step, columns))
        kernels.unpack_part(matrix, slice(0, rows), part, spec, buffer)
        torch.mm(grad, buffer[:, : part.stop - first], out=out[:, part])
        if update is not None:
            update.add_to_(out[:, part], part)
    return out


def _size_at_once(size: int, other: int, dtype: torch.dtype) -> int:
    """Return how many rows (or columns) of a matrix with `size` of them are dequantized at a time.

    Args:
        size: number of rows (or columns) of the matrix.
        other: number of its columns (or rows).
        dtype: dtype of the dequantized values.
    """
    parts = max(-(-size // _PANEL_WIDTH), -(-size * other * dtype.itemsize // _PANEL_BYTES))
    return min(size, -(-size // (parts * _STEP)) * _STEP)

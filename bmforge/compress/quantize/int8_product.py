"""Training with int8 products in earnest: rows of weights by tokens, each with a scale.

The forward pass has the bits of the runtime's "int8-dynamic". Backward keeps integers only: a
quarter of what fp32 activations take. By choice it multiplies integers as well: what goes in is
rounded again, for the input's gradient by tokens, for the weight's by rows of the weight.

Source: BMCook's quantisation-aware training (cpm_kernels' GEMMInt8), written down in its terms; the
weight's gradient goes straight through the rounding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bmforge.compress.rounding import quantize_activations, quantize_rows
from bmforge.nn.packing import QuantSpec

__all__ = ["int8_linear", "multiply_int8"]

_ROWS = QuantSpec(8, 0, scale_dtype="float32")
# Products of accelerators take more rows than 16, and widths in eights.
_LEAST_ROWS, _STEP = 24, 8


def multiply_int8(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of two matrices of int8 in int32.

    Shape:
        left: (M, K); right: (K, N); returns (M, N)
    """
    if left.is_cpu:
        return torch._int_mm(left.contiguous(), right)
    rows, inner, columns = left.shape[0], -left.shape[1] % _STEP, -right.shape[1] % _STEP
    more = max(_LEAST_ROWS - rows, -rows % _STEP)
    wide = F.pad(left, (0, inner, 0, more))
    return torch._int_mm(wide, F.pad(right, (0, columns, 0, inner)))[:rows, : right.shape[1]]


class _Int8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, in_both: bool) -> Tensor:
        rows, row_scales = quantize_rows(weight.detach(), _ROWS)
        tokens, token_scales = quantize_activations(x.detach(), x.shape[1])
        ctx.save_for_backward(tokens, token_scales, rows, row_scales)
        ctx.in_both, ctx.dtypes = in_both, (x.dtype, weight.dtype)
        sums = multiply_int8(tokens, rows.t()).float()
        return (sums * (token_scales * row_scales)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tokens, token_scales, rows, row_scales = ctx.saved_tensors
        grad = grads[0].float()
        x_grad = weight_grad = None
        run = _multiply_rounded if ctx.in_both else _multiply_floats
        if ctx.needs_input_grad[0]:
            x_grad = run(grad * row_scales, rows).to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            weight_grad = run((grad * token_scales).t(), tokens).to(ctx.dtypes[1])
        return x_grad, weight_grad, None


def _multiply_floats(left: Tensor, right: Tensor) -> Tensor:
    return left @ right.float()


def _multiply_rounded(left: Tensor, right: Tensor) -> Tensor:
    """Round the rows of what goes in, and multiply integers."""
    values, scales = quantize_activations(left, left.shape[1])
    return multiply_int8(values, right).float() * scales


def int8_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, in_both: bool = False
) -> Tensor:
    """Return ``x @ weight.T + bias``, multiplied as integers.

    Args:
        x: what goes in.
        weight: rounded by rows.
        bias: added as it is.
        in_both: multiply integers in the backward pass too.

    Shape:
        x: (..., in); weight: (out, in); returns (..., out)
    """
    out = _Int8Linear.apply(x.reshape(-1, x.shape[-1]), weight, in_both)
    out = out if bias is None else out + bias.to(out.dtype)
    return out.view(*x.shape[:-1], -1)

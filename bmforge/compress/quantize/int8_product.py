"""Training with int8 matrix products: one scale per weight row and one per token.

The forward pass is bit-identical to inference with "int8-dynamic". Only int8 tensors are saved for
the backward pass, a quarter of the size of fp32 activations. Optionally the backward pass also uses
int8 products; its inputs are quantized again, per token for the input's gradient and per weight row
for the weight's gradient.

Source: BMCook's quantization-aware training (cpm_kernels' GEMMInt8); the weight's gradient uses a
straight-through estimator.
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
# torch._int_mm on CUDA needs more than 16 rows, and widths that are multiples of 8.
_LEAST_ROWS, _STEP = 24, 8


def multiply_int8(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of two int8 matrices in int32.

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
    """Quantize the rows of `left` to int8, and multiply with an int8 matrix."""
    values, scales = quantize_activations(left, left.shape[1])
    return multiply_int8(values, right).float() * scales


def int8_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, in_both: bool = False
) -> Tensor:
    """Return ``x @ weight.T + bias``, computed with int8 products.

    Args:
        x: input, quantized per token.
        weight: weight, quantized per row.
        bias: bias, added without quantization.
        in_both: use int8 products in the backward pass as well (default: False).

    Shape:
        x: (..., in); weight: (out, in); returns (..., out)
    """
    out = _Int8Linear.apply(x.reshape(-1, x.shape[-1]), weight, in_both)
    out = out if bias is None else out + bias.to(out.dtype)
    return out.view(*x.shape[:-1], -1)

"""Autograd functions of products with packed matrices; only the input and the bias have gradients.

Backward dequantizes the matrices again, so that no dequantized weight is kept after forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bmforge.nn.grouped import grouped_linear
from bmforge.nn.packing import PackedMatrix, QuantSpec, dequantize_stack
from bmforge.nn.panel_products import multiply_transposed
from bmforge.nn.products import (
    are_plain_cpu_tensors,
    decode_spec,
    encode_spec,
    load_kernels,
    product_dtype,
)
from bmforge.nn.tracing import is_tracing

__all__ = ["GroupedProduct", "Product", "multiply_gradient"]


class Product(torch.autograd.Function):
    """Autograd function of ``x @ matrix.T + bias``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        packed: Tensor,
        scales: Tensor,
        minima: Tensor | None,
        rows: int,
        spec: list[int],
        bias: Tensor | None,
    ) -> Tensor:
        # The input is not saved: the matrix is frozen, and the gradients of input and bias do not
        # need it.
        ctx.save_for_backward(packed, scales, minima)
        ctx.rows, ctx.spec, ctx.bias_dtype = rows, spec, None if bias is None else bias.dtype
        return torch.ops.bmforge.multiply_packed(x, packed, scales, minima, rows, spec, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, x_grad, bias_grad = grads[0], None, None
        if ctx.needs_input_grad[0]:
            matrix = PackedMatrix(*ctx.saved_tensors)
            x_grad = multiply_gradient(grad, matrix, ctx.rows, decode_spec(ctx.spec, matrix))
        if ctx.needs_input_grad[6]:
            bias_grad = grad.sum(0, dtype=ctx.bias_dtype)
        return x_grad, None, None, None, None, None, bias_grad


class GroupedProduct(torch.autograd.Function):
    """Autograd function of a product of every group of rows with its own matrix of a stack."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        packed: Tensor,
        scales: Tensor,
        minima: Tensor | None,
        rows: int,
        spec: list[int],
        ends: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(packed, scales, minima, ends)
        ctx.rows, ctx.spec = rows, spec
        return torch.ops.bmforge.multiply_stacked(x, packed, scales, minima, rows, spec, ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, (packed, scales, minima, ends) = grads[0], ctx.saved_tensors
        stack = PackedMatrix(packed, scales, minima)
        spec = decode_spec(ctx.spec, stack)
        # The loop below waits for `ends` on an accelerator, and its writes in place can be neither
        # traced nor differentiated.
        if not grad.is_cpu or torch.is_grad_enabled() or is_tracing():
            matrices = dequantize_stack(packed, scales, minima, ctx.rows, ctx.spec).to(grad.dtype)
            return grouped_linear(grad, matrices.transpose(1, 2), ends), *[None] * 6
        # One matrix at a time: the whole dequantized stack would be many times larger.
        x_grad = grad.new_empty(grad.shape[0], packed.shape[2] * 32 // spec.bits)
        first = 0
        for number, last in enumerate(ends.tolist()):
            if last > first:
                matrix = PackedMatrix(*(None if t is None else t[number] for t in stack))
                x_grad[first:last] = multiply_gradient(grad[first:last], matrix, ctx.rows, spec)
            first = last
        return x_grad, *[None] * 6


def multiply_gradient(grad: Tensor, matrix: PackedMatrix, rows: int, spec: QuantSpec) -> Tensor:
    """Return ``grad @ matrix``, the gradient of the input of a product.

    On a CPU, the product is computed in `product_dtype`, to which the weights are rounded. The
    result is differentiable if gradients are enabled.

    Shape:
        grad: (T, rows) -> (T, columns), in its dtype
    """
    on_host = grad.is_cpu or grad.is_meta
    dtype = product_dtype(grad.dtype) if on_host else grad.dtype
    # The kernels write into preallocated memory, which autograd and tracing cannot follow.
    is_traced = torch.is_grad_enabled() or is_tracing()
    kernels = load_kernels() if not is_traced and are_plain_cpu_tensors(*matrix) else None
    if kernels is not None and grad.is_cpu:
        return multiply_transposed(kernels, grad.to(dtype), matrix, rows, spec).to(grad.dtype)
    weight = torch.ops.bmforge.dequantize(*matrix, rows, encode_spec(spec))
    return (grad.to(dtype) @ weight.to(dtype)).to(grad.dtype)

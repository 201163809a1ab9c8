"""Product of a packed matrix plus a LoRA update, as one autograd function for training.

Separate functions would write the output twice in forward, and the input's gradient three times in
backward: the gradient through the matrix, the gradient through the LoRA, and their sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bmforge.nn.packed_autograd import multiply_gradient
from bmforge.nn.packing import PackedMatrix
from bmforge.nn.panel_products import Update, multiply_by_panels, multiply_transposed
from bmforge.nn.products import decode_spec, load_kernels

__all__ = ["AdaptedProduct"]


class AdaptedProduct(torch.autograd.Function):
    """Autograd function of ``x @ matrix.T + bias + scale * x @ down.T @ up.T``.

    Requires compiled kernels. `x`, `down`, `up` and `bias` have the same dtype, fp32 or bf16. The
    matrix has no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        down: Tensor,
        up: Tensor,
        bias: Tensor | None,
        scale: float,
        matrix: PackedMatrix,
        rows: int,
        numbers: list[int],
    ) -> Tensor:
        flat, spec, kernels = x.flatten(0, -2), decode_spec(numbers, matrix), load_kernels()
        assert kernels is not None
        low = flat @ down.t()
        # `low` has R columns only, so keeping it costs less than computing it again.
        ctx.save_for_backward(x, low, down, up, *matrix)
        ctx.scale, ctx.rows, ctx.spec = scale, rows, spec
        # Not a view of the product, which a model could not change in place (Llama 4).
        result = x.new_empty(*x.shape[:-1], rows)
        update, out = Update(low, up.t(), scale), result.flatten(0, -2)
        multiply_by_panels(kernels, flat.contiguous(), matrix, rows, spec, bias, update, out)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, low, down, up, *tensors = ctx.saved_tensors
        matrix, kernels = PackedMatrix(*tensors), load_kernels()
        is_traced = torch.is_grad_enabled()  # second derivatives go through `low` too
        flat, grad = x.flatten(0, -2), grads[0].flatten(0, -2)
        low = flat @ down.t() if is_traced else low
        needs_x, needs_down, needs_up, needs_bias = ctx.needs_input_grad[:4]
        # `grad @ up` first: the other order would compute `up @ down`, as large as the matrix.
        low_grad = (grad @ up) * ctx.scale
        x_grad = down_grad = up_grad = bias_grad = None
        if needs_x and (is_traced or kernels is None):
            x_grad = multiply_gradient(grad, matrix, ctx.rows, ctx.spec) + low_grad @ down
        elif needs_x and kernels is not None:
            # Added panel by panel while the panel of the gradient is in the cache.
            update = Update(low_grad, down)
            x_grad = multiply_transposed(kernels, grad, matrix, ctx.rows, ctx.spec, update)
        if needs_down:
            down_grad = low_grad.t() @ flat
        if needs_up:  # as in `AddLowRank`
            up_grad = (low.t() @ grad).t().contiguous() * ctx.scale
        if needs_bias:
            bias_grad = grad.sum(0)
        x_grad = None if x_grad is None else x_grad.view(x.shape)
        return x_grad, down_grad, up_grad, bias_grad, None, None, None, None

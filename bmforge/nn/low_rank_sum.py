"""Adds a LoRA update to a layer's output in training, with fewer passes than separate operations.

`LowRank` uses `AddLowRank` where `can_use_low_rank_sum` allows it. In all other cases (tracing,
autocast, sharded tensors) it uses torch's operations one by one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bmforge.nn.tracing import is_tracing

__all__ = ["AddLowRank", "can_use_low_rank_sum"]


def can_use_low_rank_sum(*tensors: Tensor) -> bool:
    """Return True if `AddLowRank` supports a call with these tensors.

    Gradients must be enabled, tracing and autocast off. The tensors must have the same dtype and at
    least two dims, and not be of a tensor subclass.
    """
    plain = all(
        type(t) in (Tensor, nn.Parameter) and t.dtype == tensors[0].dtype and t.dim() > 1
        for t in tensors
    )
    device = tensors[0].device.type
    return (
        plain
        and torch.is_grad_enabled()
        and not is_tracing()
        and not torch.is_autocast_enabled(device)
    )


class AddLowRank(torch.autograd.Function):
    """Autograd function of ``out + scale * x @ down.T @ up.T`` without a tensor for the update.

    `addmm` adds the update while it writes the sum, which saves two passes over a tensor of the
    output's size. The gradient of `up` is computed transposed, as (R, T) times (T, out): this takes
    BLAS libraries a third to half of the time of (out, T) times (T, R), whose result has rows of
    only R numbers.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, x: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
        low = x.flatten(0, -2) @ down.t()
        ctx.save_for_backward(x, low, down, up)
        ctx.scale = scale
        # Not a view of the product, which a model could not change in place (Llama 4).
        result = out.new_empty(out.shape)
        torch.addmm(out.flatten(0, -2), low, up.t(), alpha=scale, out=result.flatten(0, -2))
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, low, down, up = ctx.saved_tensors
        if torch.is_grad_enabled():  # second derivatives go through `low` too
            low = x.flatten(0, -2) @ down.t()
        needs_out, needs_x, needs_down, needs_up, _ = ctx.needs_input_grad
        grad = grads[0].flatten(0, -2)
        low_grad = (grad @ up) * ctx.scale if needs_x or needs_down else None
        x_grad = down_grad = up_grad = None
        if needs_x and low_grad is not None:
            x_grad = (low_grad @ down).view(x.shape)
        if needs_down and low_grad is not None:
            down_grad = low_grad.t() @ x.flatten(0, -2)
        if needs_up:
            up_grad = (low.t() @ grad).t().contiguous() * ctx.scale
        return (grads[0] if needs_out else None), x_grad, down_grad, up_grad, None

"""Upcasts trained 16-bit parameters to fp32, so that small optimizer updates are not lost.

A bf16 number has 8 bits of precision: an update of less than 1/256 of a weight rounds to nothing.
So the optimizer updates fp32 master weights, and `precision` is the compute dtype of the blocks.
"""

from __future__ import annotations

import torch
from torch import nn

from bmforge.logging import get_logger
from bmforge.shards import is_streamed

__all__ = ["is_half", "master_weight_problems", "upcast_trained_"]

_HALF = (torch.bfloat16, torch.float16)
_NUM_EXAMPLES = 3


def is_half(tensor: torch.Tensor) -> bool:
    """Return True for a bf16 or fp16 tensor."""
    return tensor.dtype in _HALF


def master_weight_problems(model: nn.Module, precision: str) -> list[str]:
    """Return the reasons why the trained 16-bit parameters cannot be upcast; [] if they can.

    In fp32 precision, an fp32 layer cannot process the 16-bit output of a frozen layer.
    """
    trained, frozen = _half_parameters(model)
    if not trained or not frozen or precision != "fp32":
        return []
    dtype = str(frozen[0][1].dtype).removeprefix("torch.")
    short = "fp16" if dtype == "float16" else "bf16"
    return [
        (
            f"precision='fp32' needs fp32 parameters, but the trained parameter {trained[0][0]} "
            f"and the frozen parameter {frozen[0][0]} are {dtype}. Set precision={short!r} "
            "(trained parameters get fp32 master weights), convert the model with model.float(), "
            "or set master_weights=False to train the 16-bit parameters directly"
        )
    ]


def upcast_trained_(model: nn.Module, precision: str) -> int:
    """Upcast the trained 16-bit parameters of a model to fp32, in place, and log their number.

    If the model then computes in fp32, its buffers are upcast as well.

    Returns:
        number of parameters that were upcast
    """
    trained, frozen = _half_parameters(model)
    for _, parameter in trained:
        parameter.data = parameter.data.float()
        # Torch refuses a gradient whose dtype differs from the parameter's.
        parameter.grad = None
    if trained and not frozen and precision == "fp32":
        for buffer in model.buffers():
            if is_half(buffer):
                buffer.data = buffer.data.float()
    if trained:
        get_logger().info(
            (
                "upcast %d trained 16-bit parameters to fp32 (%s%s), because small updates are "
                "lost in 16 bits. Set master_weights=False to train them in 16 bits."
            ),
            len(trained),
            ", ".join(name for name, _ in trained[:_NUM_EXAMPLES]),
            ", ..." if len(trained) > _NUM_EXAMPLES else "",
        )
    return len(trained)


def _half_parameters(
    model: nn.Module,
) -> tuple[list[tuple[str, nn.Parameter]], list[tuple[str, nn.Parameter]]]:
    """Return the named 16-bit parameters of a model as two lists: trained and frozen."""
    half = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if is_half(parameter) and not is_streamed(parameter)
    ]
    trained = [(name, p) for name, p in half if p.requires_grad]
    return trained, [(name, p) for name, p in half if not p.requires_grad]

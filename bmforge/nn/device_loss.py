"""The linear cross-entropy on an accelerator: one kernel computes losses and gradients of logits.

Torch's operations read and write a chunk of logits about ten times, in fp32. The kernel reads it
twice and overwrites it with the gradient, in the dtype of the matrix products.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from bmforge.nn.tiled_logits import TiledHead
from bmforge.nn.triton_kernels.load import load_loss_kernels

if TYPE_CHECKING:
    from bmforge.nn.triton_kernels.launch import TritonKernels

__all__ = ["find_loss_kernels", "pad_head", "run_device_loss"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# cuBLAS is 3 to 8 times slower if the vocabulary size is not a multiple of 8.
_ALIGNED, _PADDED = 8, 64


def find_loss_kernels(hidden: Tensor, weight: object) -> TritonKernels | None:
    """Return the kernels for the loss of a head; None if torch must compute it."""
    if not isinstance(weight, Tensor) or is_traceable_wrapper_subclass(weight):
        return None
    if hidden.dtype not in _DTYPES or weight.dtype != hidden.dtype:
        return None
    return None if torch.compiler.is_compiling() else load_loss_kernels(hidden.device)


def pad_head(
    weight: Tensor, bias: Tensor | None, added: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """Pad a 16-bit head with rows of zeros if its number of rows is not a multiple of 8.

    Args:
        weight: weight, (V, D).
        bias: bias, (V,), or None.
        added: low-rank factors (a, b, a, b, ...), (M, R) and (V, R).
    """
    rows = weight.shape[0]
    if weight.dtype == torch.float32 or rows % _ALIGNED == 0:
        return weight, bias, added
    more = -rows % _PADDED
    padded = [F.pad(t, (0, 0, 0, more)) if n % 2 else t for n, t in enumerate(added)]
    bias = None if bias is None else F.pad(bias, (0, more))
    return F.pad(weight, (0, 0, 0, more)), bias, tuple(padded)


def run_device_loss(
    kernels: TritonKernels,
    head: TiledHead,
    labels: Tensor,
    scale: Tensor,
    columns: int,
    chunks: list[slice],
) -> Tensor:
    """Return the loss summed over all tokens; collect the gradients of the head's inputs.

    Args:
        kernels: kernels of the device.
        head: inputs of the head; `pad_head` may have added rows to its weight.
        labels: target columns, (M,); -100 ignores a token.
        scale: factor of the loss, which fp16 gradients need before they are rounded.
        columns: number of vocabulary columns, without those that `pad_head` added.
        chunks: tokens of each chunk; the first one is the longest.
    """
    hidden, weight = head.pairs[0]
    width = weight.shape[0]
    buffer = hidden.new_empty(chunks[0].stop, width)
    factor = scale if hidden.dtype == torch.float16 else None
    total, every = torch.zeros_like(scale), slice(0, width)
    for tokens in chunks:
        tile = head.score_(buffer[: tokens.stop - tokens.start], tokens, every)
        losses = kernels.cross_entropy_(
            tile[:, :columns], labels[tokens], factor, has_gradient=head.needs_gradients
        )
        total += losses.sum()
        if head.needs_gradients:
            # Padded columns are products with zeros, so they are 0 here too.
            head.collect_(tile, tokens, every)
            head.finish_tokens_(tokens)
    head.cut_(columns)
    return total

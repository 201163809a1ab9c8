"""PyTorch implementations of RMS norm and RoPE: reference for the kernels, and fallback."""

from __future__ import annotations

import torch
from torch import Tensor

from bmforge.device import accumulation_dtype
from bmforge.nn.in_place import add_temporary, multiply_temporary

__all__ = ["plain_rms_norm", "plain_rotate"]


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``weight * x / sqrt(mean(x^2) + eps)``, normalized in fp32 or wider."""
    wide = x.to(accumulation_dtype(x.dtype))
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(weight.dtype)


def plain_rotate(x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool) -> Tensor:
    """Rotate the first dims of heads by RoPE; see `position.apply_rope`.

    Shape:
        x: (..., H); cos and sin: (..., R); returns the shape of x
    """
    width = cos.shape[-1]
    rotated, unrotated = x[..., :width], x[..., width:]
    if is_interleaved:
        even, odd = rotated[..., 0::2], rotated[..., 1::2]
        swapped = torch.stack((-odd, even), dim=-1).flatten(-2)
    else:
        first, second = rotated.chunk(2, dim=-1)
        swapped = torch.cat((-second, first), dim=-1)
    rotated = add_temporary(rotated * cos, multiply_temporary(swapped, sin))
    return rotated if unrotated.shape[-1] == 0 else torch.cat((rotated, unrotated), dim=-1)

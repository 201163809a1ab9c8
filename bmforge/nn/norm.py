"""Normalization layers and their hyperparameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from bmforge.device import accumulation_dtype
from bmforge.nn.device_kernels import can_use_device_kernels
from bmforge.nn.host_rows import can_use_host_rms_norm, host_rms_norm
from bmforge.nn.plain_rows import plain_rms_norm

__all__ = ["NormKind", "NormSpec", "RMSNorm", "build_norm"]

NormKind = Literal["layer", "rms"]


@dataclass(frozen=True)
class NormSpec:
    """Kind and hyperparameters of a norm.

    Args:
        kind: "layer" or "rms".
        eps: epsilon added to the variance.
        bias: whether a layer norm has a bias.
        affine: whether a layer norm has a weight (and a bias).
        offset: number added to the weight of an RMS norm, whose initial weight is 1 - offset
            (Gemma: 1).
    """

    kind: NormKind = "layer"
    eps: float = 1e-5
    bias: bool = True
    affine: bool = True
    offset: float = 0.0


class RMSNorm(nn.Module):
    """Root-mean-square norm ``weight * x / sqrt(mean(x^2) + eps)``; statistics in fp32 or wider.

    Args:
        hidden_size: width D of the normalized dim.
        eps: epsilon added to the mean square.
        offset: number added to the weight (Gemma); if not 0, the product with the sum is computed
            in fp32 or wider.

    Shape:
        x: (..., D) -> (..., D)

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019). As in Llama, the
    normalized value is cast to the weight's dtype before it is multiplied, so that an fp32 residual
    stream can enter 16-bit projections.
    """

    def __init__(self, hidden_size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.full((hidden_size,), 1.0 - offset))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dim."""
        if not self.offset and can_use_host_rms_norm(x, self.weight):
            return host_rms_norm(x, self.weight, self.eps)
        if not self.offset and can_use_device_kernels(x, self.weight):
            return torch.ops.bmforge.rms_norm(x, self.weight, self.eps)
        if not self.offset:
            return plain_rms_norm(x, self.weight, self.eps)
        wide = x.to(accumulation_dtype(x.dtype))
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        weight = self.weight.to(wide.dtype) + self.offset
        return (wide * scale * weight).to(self.weight.dtype)

    def extra_repr(self) -> str:
        """Return width, epsilon and offset as text."""
        offset = f", offset={self.offset}" if self.offset else ""
        return f"{self.weight.shape[0]}, eps={self.eps}{offset}"


def build_norm(spec: NormSpec, hidden_size: int) -> nn.Module:
    """Build the norm described by `spec` for `hidden_size` features."""
    if spec.kind == "rms":
        return RMSNorm(hidden_size, spec.eps, spec.offset)
    return nn.LayerNorm(hidden_size, spec.eps, spec.affine, spec.bias)

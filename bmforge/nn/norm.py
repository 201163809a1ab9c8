"""Normalisation layers, chosen by a word."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

__all__ = ["NormKind", "RMSNorm", "build_norm"]

NormKind = Literal["layer", "rms"]


class RMSNorm(nn.Module):
    """Root-mean-square norm: ``weight * x / sqrt(mean(x^2) + eps)``, statistics in fp32 or wider.

    Shape:
        x: (..., D) -> (..., D)

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019). As in Llama, the
    normalised value is rounded to the input's dtype before the weight is applied.
    """

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim."""
        wide = x if x.dtype == torch.float64 else x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)

    def extra_repr(self) -> str:
        """Show the width and epsilon."""
        return f"{self.weight.shape[0]}, eps={self.eps}"


def build_norm(kind: NormKind, hidden_size: int, eps: float, bias: bool = True) -> nn.Module:
    """Return the norm named by `kind`: ``"layer"`` (optionally without bias) or ``"rms"``."""
    if kind == "rms":
        return RMSNorm(hidden_size, eps)
    return nn.LayerNorm(hidden_size, eps=eps, bias=bias)

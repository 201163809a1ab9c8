"""Routers for mixtures of experts."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["RouterKind", "TwoLayerRouter", "build_router"]

RouterKind = Literal["linear", "two_layer"]


class TwoLayerRouter(nn.Module):
    """Two-layer router: ``second(tanh(first(x / |x|)))``, without biases.

    Args:
        hidden_size: width D of the hidden states.
        num_experts: number E of experts.

    Shape:
        x: (M, D) -> (M, E)

    Source: Zhang et al., "MoEfication" (2022), as in BMCook, which initializes `first` to the mean
        row of each expert (so that it computes similarities) and `second` to the identity.
    """

    def __init__(self, hidden_size: int, num_experts: int) -> None:
        super().__init__()
        self.first = nn.Linear(hidden_size, num_experts, bias=False)
        self.second = nn.Linear(num_experts, num_experts, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the router logits."""
        return self.second(torch.tanh(self.first(F.normalize(x, dim=-1))))


def build_router(kind: RouterKind, hidden_size: int, num_experts: int) -> nn.Module:
    """Build a router of the given kind, (M, D) -> (M, E)."""
    if kind == "two_layer":
        return TwoLayerRouter(hidden_size, num_experts)
    return nn.Linear(hidden_size, num_experts, bias=False)

"""Routers of MoE layers, and the choice of a token's experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.device import accumulation_dtype

__all__ = ["RouterKind", "Scoring", "TwoLayerRouter", "WideRouter", "build_router", "pick_experts"]

RouterKind = Literal["linear", "two_layer", "wide"]
Scoring = Literal["softmax", "sigmoid"]


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


class WideRouter(nn.Linear):
    """Linear router that computes in fp32, with an optional bias for choosing the experts.

    Args:
        hidden_size: width D of the hidden states.
        num_experts: number E of experts.
        has_choice_bias: add the buffer `choice_bias`, which `pick_experts` adds to the scores.
            It is not trained; DeepSeek adapted it to the loads of the experts.

    Shape:
        x: (M, D) -> (M, E), fp32 unless `x` is fp64

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (arXiv 2412.19437), section 2.1.2.
    """

    choice_bias: Tensor | None

    def __init__(self, hidden_size: int, num_experts: int, has_choice_bias: bool) -> None:
        super().__init__(hidden_size, num_experts, bias=False)
        bias = torch.zeros(num_experts, dtype=torch.float32) if has_choice_bias else None
        self.register_buffer("choice_bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the router logits."""
        wide = accumulation_dtype(x.dtype)
        return F.linear(x.to(wide), self.weight.to(wide))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> WideRouter:
        """Convert the module, but keep the bias in fp32.

        The scores of two experts may differ by less than the rounding error of a bf16 bias.
        """
        bias = self.choice_bias
        super()._apply(fn, recurse)
        if bias is not None and self.choice_bias is not None:
            converted = self.choice_bias
            if converted.dtype != bias.dtype and converted.is_floating_point():
                self.choice_bias = bias.to(converted.device)
        return self


def build_router(
    kind: RouterKind,
    hidden_size: int,
    num_experts: int,
    has_choice_bias: bool = False,
    has_bias: bool = False,
) -> nn.Module:
    """Build a router, (M, D) -> (M, E).

    Args:
        kind: kind of router; see `MoESpec`.
        hidden_size: width D of the hidden states.
        num_experts: number E of experts.
        has_choice_bias: add `WideRouter.choice_bias` to a "wide" router.
        has_bias: bias on the logits of a "linear" router.
    """
    if kind == "two_layer":
        return TwoLayerRouter(hidden_size, num_experts)
    if kind == "wide":
        return WideRouter(hidden_size, num_experts, has_choice_bias)
    return nn.Linear(hidden_size, num_experts, bias=has_bias)


def pick_experts(
    logits: Tensor,
    count: int,
    scoring: Scoring = "softmax",
    groups: tuple[int, int] = (1, 1),
    choice_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the scores (used as weights) and the indices of the k experts of each token.

    Args:
        logits: router logits, fp32 or fp64.
        count: number k of experts per token.
        scoring: function from logits to scores.
        groups: pair of the number G of groups of experts with consecutive indices, and the number
            of groups from which experts may be chosen. A group's score is the score of its best
            expert or, with "sigmoid", the sum of the scores of its two best experts.
        choice_bias: bias that is added to the scores for the choice, but not to the weights.

    Shape:
        logits: (M, E); choice_bias: (E,); returns (M, k), (M, k)

    Source: DeepSeek-AI, "DeepSeek-V2" (arXiv 2405.04434), section 2.2.2, and "DeepSeek-V3
        Technical Report" (arXiv 2412.19437), section 2.1.2.
    """
    scores = torch.sigmoid(logits) if scoring == "sigmoid" else F.softmax(logits, dim=-1)
    ranked = scores if choice_bias is None else scores + choice_bias
    number, top = groups
    if number > 1:
        by_group = ranked.unflatten(-1, (number, -1))
        best = by_group.topk(min(2, by_group.shape[-1]) if scoring == "sigmoid" else 1, dim=-1)
        chosen = best.values.sum(-1).topk(top, dim=-1).indices
        excluded = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter(-1, chosen, False)
        ranked = by_group.masked_fill(excluded.unsqueeze(-1), float("-inf")).flatten(-2)
    index = ranked.topk(count, dim=-1).indices
    return scores.gather(-1, index), index

"""Load-balancing loss of MoE layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bmforge.device import accumulation_dtype

__all__ = ["balance_loads", "count_loads", "load_balancing_loss"]


def load_balancing_loss(
    router_logits: Sequence[Tensor],
    experts_per_token: int,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """Return the load-balancing loss: k for even loads, up to E if one expert gets all tokens.

    ``E * sum over e of (C[e] / N) * (P[e] / N)``, summed over the tokens of all layers: C counts
    the tokens routed to expert e, P sums the router's probabilities of expert e, and N counts all
    tokens. The loss is a product of means, so with several micro-batches C and N must be those of
    the whole step (`count_loads`, `balance_loads`); in P it is linear.

    Args:
        router_logits: router logits of every layer with experts.
        experts_per_token: number k of experts per token.
        attention_mask: 1 for tokens, 0 for padding.

    Shape:
        router_logits: (M, E) each; attention_mask: any shape with M elements; returns a scalar

    Source: Fedus et al., "Switch Transformers" (2021), equations 4 to 6, as transformers extends
    them to k experts and all layers.
    """
    return balance_loads(*count_loads(router_logits, experts_per_token, attention_mask))


def count_loads(
    router_logits: Sequence[Tensor], experts_per_token: int, counted: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the statistics C, P and N of `load_balancing_loss`; only P has a gradient.

    Shape:
        router_logits: (M, E) each; counted: any shape with M elements; returns (E,), (E,), (1,)
    """
    logits = torch.stack(tuple(router_logits))
    wide = logits.to(accumulation_dtype(logits.dtype))
    probability = F.softmax(wide, dim=-1)
    _, index = probability.detach().topk(experts_per_token, dim=-1)
    weight = torch.ones_like(probability[..., :1])
    if counted is not None:
        weight = weight * counted.reshape(1, -1, 1).to(weight.dtype)
    chosen = torch.zeros_like(probability).scatter_(-1, index, weight.expand_as(index))
    return chosen.sum((0, 1)), (probability * weight).sum((0, 1)), weight.sum().view(1)


def balance_loads(loads: Tensor, sums: Tensor, tokens: Tensor) -> Tensor:
    """Return the load-balancing loss from the statistics C, P and N; 0 without tokens.

    Shape:
        loads, sums: (E,); tokens: (1,); returns a scalar
    """
    tokens = tokens.clamp(min=1)
    return loads.shape[0] * (loads / tokens * (sums / tokens)).sum()

"""Balanced assignment of tokens to experts by an auction.

Solves the linear assignment problem for M tokens and E experts with M / E slots each: maximize the
sum of affinities. Tokens bid for experts; a full expert keeps its highest bids, and the lowest of
these is its price.

Source: Bertsekas and Castañon, "The auction algorithm for the transportation problem" (1989), in
the variant where all unassigned tokens bid at once; applied to experts by Lewis et al., "BASE
layers" (2021).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["assign_balanced"]

# Bid increments as fractions of the affinities' range. Large increments settle the prices in a few
# rounds. The last and smallest one bounds the error: at the final prices, each token's affinity
# minus price is at most one increment below the best.
_FIRST_STEP, _LAST_STEP, _SHRINK = 0.25, 1e-4, 5.0


def assign_balanced(affinity: Tensor) -> Tensor:
    """Assign every token to an expert so that loads are even and total affinity is maximal.

    If M is not divisible by E, the most preferred experts get one token more than the others. The
    total affinity is below the maximum by at most 1e-4 of the affinities' range per token
    (measured: 2e-9). Values that are not finite count as the smallest finite value.

    Args:
        affinity: affinity of every token for every expert, such as router logits.

    Shape:
        affinity: (M, E) -> (M,), integers

    Memory: a float64 copy of the affinities.
    """
    return _assign_balanced(affinity.detach())


@torch.library.custom_op(
    "bmforge::assign_balanced", mutates_args=(), schema="(Tensor affinity) -> Tensor"
)
def _assign_balanced(affinity: Tensor) -> Tensor:
    affinity = affinity.double()
    tokens, experts = affinity.shape
    finite = affinity.isfinite()
    if experts == 1 or tokens == 0 or not bool(finite.any()):
        return torch.arange(tokens, device=affinity.device) % max(experts, 1)
    lowest, highest = affinity[finite].aminmax()
    affinity = affinity.where(finite, lowest)
    span = (highest - lowest).clamp(min=torch.finfo(torch.float32).tiny)
    slots = _count_slots(affinity)
    # An expert without a slot has an infinite price.
    prices = torch.where(slots > 0, 0.0, torch.inf).to(affinity)
    step = _FIRST_STEP
    while True:
        owners = _run_auction(affinity, prices, slots, span * step)
        if step == _LAST_STEP:
            return owners
        step = max(step / _SHRINK, _LAST_STEP)


@_assign_balanced.register_fake
def _(affinity: Tensor) -> Tensor:
    return affinity.new_empty(affinity.shape[0], dtype=torch.long)


def _count_slots(affinity: Tensor) -> Tensor:
    """Return the number of slots of every expert, (E,)."""
    tokens, experts = affinity.shape
    slots = torch.full((experts,), tokens // experts, device=affinity.device)
    liked = torch.bincount(affinity.argmax(1), minlength=experts)
    slots[liked.argsort(descending=True, stable=True)[: tokens % experts]] += 1
    return slots


def _run_auction(affinity: Tensor, prices: Tensor, slots: Tensor, step: Tensor) -> Tensor:
    """Run the auction, raising `prices` (E,) in place; return the expert of every token, (M,)."""
    tokens, experts = affinity.shape
    numbers = torch.arange(tokens, device=affinity.device)
    owners = torch.full_like(numbers, -1)
    bids = torch.zeros_like(affinity[:, 0])
    while True:
        free = (owners < 0).nonzero()[:, 0]
        if not len(free):
            return owners
        (best, second), (preferred, _) = (t.unbind(1) for t in (affinity[free] - prices).topk(2, 1))
        # If only one expert has slots, no other expert competes for the token: any margin wins.
        margin = torch.where(second.isfinite(), best - second, 0.0)
        owners[free], bids[free] = preferred, prices[preferred] + margin + step
        order = bids.argsort(descending=True, stable=True)
        order = order[owners[order].sort(stable=True).indices]
        by_expert = owners[order]
        counts = torch.bincount(by_expert, minlength=experts)
        starts = counts.cumsum(0) - counts
        outbid = numbers - starts[by_expert] >= slots[by_expert]
        owners[order[outbid]] = -1
        full = ((counts >= slots) & (slots > 0)).nonzero()[:, 0]
        prices[full] = bids[order[(starts + slots - 1)[full]]]

"""Relative positions as a trained bias on the scores: T5's buckets of distances."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["RelativeBias", "find_buckets"]


def find_buckets(
    distance: Tensor, bidirectional: bool, num_buckets: int, max_distance: int
) -> Tensor:
    """Return the bucket of every distance: exact when short, logarithmically wider when long.

    Args:
        distance: key position minus query position.
        bidirectional: later keys get buckets of their own; else they all share bucket 0.
        num_buckets: how many there are; a half goes to each side when bidirectional.
        max_distance: from here on, all share the last bucket of their side.

    Shape:
        distance: any, integers -> same

    Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer" (2020), and its code.
    """
    side = num_buckets // 2 if bidirectional else num_buckets
    first = (distance > 0).long() * side if bidirectional else torch.zeros_like(distance)
    length = distance.abs() if bidirectional else (-distance).clamp(min=0)
    exact = side // 2
    # One division by a constant after the other, as in the original: another order moves borders.
    steps = torch.log(length.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + (steps * (side - exact)).long()).clamp(max=side - 1)
    return first + torch.where(length < exact, length, far)


class RelativeBias(nn.Module):
    """A trained number per head and bucket of distances, added to attention scores.

    Args:
        num_heads: N.
        num_buckets: rows of `weight`.
        max_distance: see `find_buckets`.
        causal: for decoders: no buckets for later keys, and -inf there, so that the bias is the
            causal mask as well.

    Shape:
        returns (1, N, T, S)

    Memory: N x T x S elements, made once for all layers that share it.
    """

    def __init__(
        self, num_heads: int, num_buckets: int = 32, max_distance: int = 128, causal: bool = False
    ) -> None:
        super().__init__()
        self.num_buckets, self.max_distance, self.causal = num_buckets, max_distance, causal
        self.weight = nn.Parameter(torch.zeros(num_buckets, num_heads))

    def forward(self, query_length: int, key_length: int, offset: int = 0) -> Tensor:
        """Return the bias of T queries, the first at position `offset`, to S keys from 0 on."""
        # A row is the next one, moved by one: all of them are windows on one vector per head.
        first, last = 1 - offset - query_length, key_length - offset
        distance = torch.arange(first, last, device=self.weight.device)
        buckets = find_buckets(distance, not self.causal, self.num_buckets, self.max_distance)
        values = F.embedding(buckets, self.weight)
        if self.causal:
            values = values.masked_fill(distance[:, None] > 0, -torch.inf)
        return values.t().contiguous().unfold(1, key_length, 1).flip(1).contiguous()[None]

    def extra_repr(self) -> str:
        """Show the sizes."""
        buckets, heads = self.weight.shape
        return f"heads={heads}, buckets={buckets}, max_distance={self.max_distance}"

"""Relative position bias on attention scores (T5's buckets of distances)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["RelativeBias", "find_buckets"]


def find_buckets(
    distance: Tensor, bidirectional: bool, num_buckets: int, max_distance: int
) -> Tensor:
    """Return the bucket of each distance: one per short distance, logarithmic for long ones.

    Args:
        distance: key position minus query position.
        bidirectional: later keys have their own buckets; otherwise they all share bucket 0.
        num_buckets: number of buckets; half of them for each direction if bidirectional.
        max_distance: distance beyond which all keys in one direction share the last bucket.

    Shape:
        distance: (...), integers -> same

    Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer" (2020), and its code.
    """
    side = num_buckets // 2 if bidirectional else num_buckets
    first = (distance > 0).long() * side if bidirectional else torch.zeros_like(distance)
    length = distance.abs() if bidirectional else (-distance).clamp(min=0)
    exact = side // 2
    # Two divisions in the original's order: combining them moves bucket borders by rounding.
    steps = torch.log(length.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + (steps * (side - exact)).long()).clamp(max=side - 1)
    return first + torch.where(length < exact, length, far)


class RelativeBias(nn.Module):
    """Trained bias per head and bucket of distances, added to attention scores.

    Args:
        num_heads: number N of heads.
        num_buckets: number of buckets, which are the rows of `weight`.
        max_distance: see `find_buckets`.
        causal: bias of a decoder: later keys get -inf, so that the bias is also the causal mask.

    Shape:
        returns (1, N, T, S)

    Memory: N x T x S elements, computed once for all layers that share the bias.
    """

    def __init__(
        self, num_heads: int, num_buckets: int = 32, max_distance: int = 128, causal: bool = False
    ) -> None:
        super().__init__()
        self.num_buckets, self.max_distance, self.causal = num_buckets, max_distance, causal
        self.weight = nn.Parameter(torch.zeros(num_buckets, num_heads))

    def forward(self, query_length: int, key_length: int, offset: int = 0) -> Tensor:
        """Return the bias for T queries at positions from `offset` and S keys from position 0."""
        # Each row is the previous one shifted by one: all are windows of one vector per head.
        first, last = 1 - offset - query_length, key_length - offset
        distance = torch.arange(first, last, device=self.weight.device)
        buckets = find_buckets(distance, not self.causal, self.num_buckets, self.max_distance)
        values = F.embedding(buckets, self.weight)
        if self.causal:
            values = values.masked_fill(distance[:, None] > 0, -torch.inf)
        return values.t().contiguous().unfold(1, key_length, 1).flip(1).contiguous()[None]

    def extra_repr(self) -> str:
        """Return the sizes as text."""
        buckets, heads = self.weight.shape
        return f"heads={heads}, buckets={buckets}, max_distance={self.max_distance}"

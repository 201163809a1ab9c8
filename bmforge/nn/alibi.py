"""ALiBi: a bias on attention scores that falls linearly with the distance between two tokens.

Source: Press, Smith and Lewis, "Train Short, Test Long: Attention with Linear Biases Enables Input
Length Extrapolation" (2022).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["alibi_bias", "alibi_slopes"]


def alibi_slopes(num_heads: int) -> list[float]:
    """Return the ALiBi slope of each head.

    If the number of heads N is a power of two, the slopes are a geometric sequence that begins at
    2^(-8/N). For any other N, every second slope of the next power of two is added.
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (head + 1) / power) for head in range(power)]
    finer = [2.0 ** (-4 * (head + 1) / power) for head in range(0, 2 * power, 2)]
    return slopes + finer[: num_heads - power]


def alibi_bias(slopes: Tensor, queries: Tensor, keys: int) -> Tensor:
    """Return the ALiBi bias of queries at given positions: minus slope times distance.

    Shape:
        slopes: (N,); queries: (T,), positions in 0, ..., keys - 1; returns (1, N, T, keys)
    """
    distances = torch.arange(keys, device=slopes.device) - queries[:, None]
    return (slopes[:, None, None] * distances)[None]

"""ALiBi: a bias on attention scores that falls linearly with the distance of two tokens.

Source: Press, Smith and Lewis, "Train Short, Test Long: Attention with Linear Biases Enables Input
Length Extrapolation" (2022).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["alibi_bias", "alibi_slopes"]


def alibi_slopes(num_heads: int) -> list[float]:
    """Return ALiBi's slope of each head.

    For a power of two they are a geometric sequence from 2^(-8/N); other numbers of heads add every
    second slope of the next power of two.
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (head + 1) / power) for head in range(power)]
    finer = [2.0 ** (-4 * (head + 1) / power) for head in range(0, 2 * power, 2)]
    return slopes + finer[: num_heads - power]


def alibi_bias(slopes: Tensor, queries: int, keys: int) -> Tensor:
    """Return ALiBi's bias of the last `queries` of `keys` tokens: the slope times -distance.

    Shape:
        slopes: (N,); returns (1, N, queries, keys)
    """
    places = torch.arange(keys, device=slopes.device)
    distances = places[None, :] - places[keys - queries :, None]
    return (slopes[:, None, None] * distances)[None]

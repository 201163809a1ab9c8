"""Attention sinks: a trained logit per head in the denominator of the softmax (gpt-oss).

With a sink, a head can attend to nothing. Kernels for plain attention need no change: the sink is
the score of one more key, which all queries see and whose value is zero. Queries get additional
dims that contain the sink; in these dims, all keys are 0, but the additional key is 1.

Source: OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card" (arXiv 2508.10925), section 2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.nn.prefix import Pair

__all__ = ["HeadSinks", "add_sink_key"]

# Fused kernels on accelerators need a width that is a multiple of this.
_ALIGNED_DIMS = 8


class HeadSinks(nn.Module):
    """Trained sink logits of the query heads.

    Args:
        num_heads: number N of query heads.

    Attributes:
        bias: sink logits, (N,); initially 0.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(num_heads))

    def forward(self, rank: int, size: int) -> Tensor:
        """Return the sink logits of the heads on a tensor-parallel rank, (N / size,)."""
        return self.bias.chunk(size)[rank]


def add_sink_key(
    sinks: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prefix: Pair | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Pair]:
    """Return queries, keys, values and prefix, with an additional key whose scores are the sinks.

    Args:
        sinks: sink logit of each query head.
        query: queries.
        key: keys, with N heads or fewer.
        value: values, with as many heads as the keys.
        prefix: keys and values that every query attends to; None if there is no prefix.
        scale: factor that attention applies to the scores.

    Shape:
        sinks: (N,); query: (B, N, T, H); key, value: (B, K, S, H); prefix: (K, P, H) each;
        returns the same with a larger H, and a prefix of P + 1 keys
    """
    padding = _ALIGNED_DIMS - query.shape[-1] % _ALIGNED_DIMS
    column = (sinks / scale).to(query.dtype)[:, None, None].expand(*query.shape[:-1], 1)
    query = F.pad(torch.cat((query, column), -1), (0, padding - 1))
    heads, width = key.shape[1], key.shape[-1]
    sink_key = F.pad(key.new_ones(heads, 1, 1), (width, padding - 1))
    front = sink_key, torch.zeros_like(sink_key)
    key, value = (F.pad(tensor, (0, padding)) for tensor in (key, value))
    if prefix is not None:
        padded = (F.pad(tensor, (0, padding)).to(key.dtype) for tensor in prefix)
        first, second = (torch.cat(pair, 1) for pair in zip(front, padded, strict=True))
        front = first, second
    return query, key, value, front

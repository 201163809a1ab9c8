"""Attention with a bias on the scores that is itself trained (T5 and its relatives).

Torch's fused kernels refuse a bias that wants a gradient, and its fallback keeps B x N x T x S
weights for backward. Here scores exist one tile at a time, and backward makes them again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["biased_attention"]

# Scores in flight. On a CPU 1 MiB of fp32 per thread stays in its cache; an accelerator wants
# large products.
_HOST_TILE_ELEMENTS = 1 << 18
_TILE_ELEMENTS = 1 << 26


def biased_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return ``softmax(scale * q k^T + bias) v``.

    Args:
        query: queries.
        key: keys, of as many heads.
        value: values, of as many heads.
        bias: added to the scaled scores; may want a gradient, and be -inf where a query may not
            look (not in a whole row).
        mask: boolean, True where a query may look.
        scale: None is 1/sqrt(H).
        dropout: probability of dropping a weight.

    Shape:
        query: (B, N, T, H); key, value: (B, N, S, H); bias: (B or 1, N, T, S);
        mask: (B or 1, 1, T or 1, S); returns (B, N, T, H)

    Memory: one tile of scores; with dropout also one byte per weight, from forward to backward.
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    wants_gradient = torch.is_grad_enabled() and bias.requires_grad
    if torch.compiler.is_compiling() or not wants_gradient:
        if mask is not None:
            bias = bias.masked_fill(~mask, -torch.inf)
        return F.scaled_dot_product_attention(query, key, value, bias, dropout, scale=scale)
    hidden = None if mask is None else ~mask
    return _BiasedAttention.apply(query, key, value, bias, hidden, scale, dropout)


class _Tile(NamedTuple):
    """Which scores: slices of rows, heads and query tokens. Either one row or all heads."""

    rows: slice
    heads: slice
    tokens: slice
    num_heads: int

    @property
    def size(self) -> tuple[int, ...]:
        """Rows, heads and tokens."""
        return tuple(part.stop - part.start for part in self[:3])

    def cut(self, flat: Tensor) -> Tensor:
        """This tile of (B * N, T or S, ...), all tokens of it."""
        first = self.rows.start * self.num_heads + self.heads.start
        rows, heads, _ = self.size
        return flat[first : first + rows * heads]

    def cut_shared(self, tensor: Tensor) -> Tensor:
        """This tile of (B or 1, N or 1, T or 1, S), as (rows * heads, tokens or 1, S)."""
        tensor = tensor[:, :, self.tokens] if tensor.shape[2] > 1 else tensor
        tensor = tensor[:, self.heads] if tensor.shape[1] > 1 else tensor
        tensor = tensor[self.rows] if tensor.shape[0] > 1 else tensor
        return tensor.expand(*self.size[:2], *tensor.shape[2:]).flatten(0, 1)

    def put(self, target: Tensor, part: Tensor, tokens: slice, first: bool) -> None:
        """Write (rows * heads, T, ...) into this tile's place in (B or 1, N, T, ...), or add it.

        Summed over rows where the target has one row for all.
        """
        place = target[self.rows if target.shape[0] > 1 else slice(None), self.heads, tokens]
        part = part.unflatten(0, (-1, place.shape[1]))
        part = part if part.shape[0] == place.shape[0] else part.sum(0, keepdim=True)
        place.copy_(part) if first else place.add_(part)


def _tiles(query: Tensor, key: Tensor) -> Iterator[_Tile]:
    """Cut the scores into tiles that are not too large: several rows, some heads or some tokens.

    Heads come first, so that a tile's bias is used for all rows while it is at hand.
    """
    batch, num_heads, length, _ = query.shape
    limit = _TILE_ELEMENTS
    if query.is_cpu:
        limit = _HOST_TILE_ELEMENTS * torch.get_num_threads()
    per_head = length * key.shape[2]
    tokens = min(length, max(1, limit // key.shape[2]))
    heads = min(num_heads, max(1, limit // per_head))
    rows = min(batch, max(1, limit // (per_head * num_heads)))
    for head in range(0, num_heads, heads):
        for row in range(0, batch, rows):
            for token in range(0, length, tokens):
                yield _Tile(
                    slice(row, min(row + rows, batch)),
                    slice(head, min(head + heads, num_heads)),
                    slice(token, min(token + tokens, length)),
                    num_heads,
                )


def _flatten(*tensors: Tensor) -> list[Tensor]:
    """Bring (B, N, T, H) into (B * N, T, H): products of neighbouring rows are faster."""
    return [tensor.contiguous().flatten(0, 1) for tensor in tensors]


class _BiasedAttention(torch.autograd.Function):
    """Keeps its inputs and, with dropout, what was kept; weights are made again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor,
        hidden: Tensor | None,
        scale: float,
        dropout: float,
    ) -> Tensor:
        out = torch.empty_like(query)
        kept: Tensor | None = None
        if dropout:
            shape = (*query.shape[:3], key.shape[2])
            kept = torch.empty(shape, dtype=torch.bool, device=query.device).bernoulli_(1 - dropout)
        q, k, v = _flatten(query, key, value)
        for tile in _tiles(query, key):
            weights = _make_weights(tile, q, k, bias, hidden, scale)
            if kept is not None:
                weights.mul_(tile.cut_shared(kept)).div_(1 - dropout)
            tile.put(out, torch.bmm(weights, tile.cut(v)), tile.tokens, first=True)
        ctx.save_for_backward(query, key, value, bias, hidden, kept)
        ctx.scale, ctx.dropout = scale, dropout
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, hidden, kept = ctx.saved_tensors
        out = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
        grad_query, grad_key, grad_value = out
        # Sums over rows; in half precision they would lose what single rows add.
        wide = torch.promote_types(bias.dtype, torch.float32)
        grad_bias = bias.new_empty(bias.shape, dtype=wide)
        q, k, v, grad_out = _flatten(query, key, value, grads[0])
        everything = slice(None)
        for tile in _tiles(query, key):
            weights = _make_weights(tile, q, k, bias, hidden, ctx.scale)
            grad, tokens = tile.cut(grad_out)[:, tile.tokens], tile.tokens
            scores = torch.bmm(grad, tile.cut(v).transpose(1, 2))
            used = weights
            if kept is not None:
                factor = tile.cut_shared(kept).to(weights.dtype).div_(1 - ctx.dropout)
                used = weights * factor
                scores.mul_(factor)
            first = tokens.start == 0
            tile.put(grad_value, torch.bmm(used.transpose(1, 2), grad), everything, first)
            scores = torch._softmax_backward_data(scores, weights, -1, weights.dtype)
            alone = tile.rows.start == 0 or bias.shape[0] > 1
            tile.put(grad_bias, scores, tokens, alone)
            if ctx.scale != 1.0:
                scores.mul_(ctx.scale)
            tile.put(grad_query, torch.bmm(scores, tile.cut(k)), tokens, first=True)
            part = torch.bmm(scores.transpose(1, 2), tile.cut(q)[:, tokens])
            tile.put(grad_key, part, everything, first)
        return *out, grad_bias.to(bias.dtype), None, None, None


def _make_weights(
    tile: _Tile, query: Tensor, key: Tensor, bias: Tensor, hidden: Tensor | None, scale: float
) -> Tensor:
    """Softmax of one tile of scores, (rows * heads, tokens, S), from flat queries and keys."""
    keys = tile.cut(key).transpose(1, 2)
    queries = tile.cut(query)[:, tile.tokens]
    scores = torch.baddbmm(tile.cut_shared(bias), queries, keys, alpha=scale)
    if hidden is not None:
        scores.masked_fill_(tile.cut_shared(hidden), -torch.inf)
    return scores.softmax(-1)

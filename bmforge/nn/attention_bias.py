"""Attention with a trained bias on the scores (T5) or a soft cap of the scores (Gemma 2).

Torch's fused kernels refuse a bias that requires a gradient, and its fallback stores B x N x T x S
weights for backward. This implementation keeps one tile of scores at a time, and backward
recomputes the tiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from bmforge.device import accumulation_dtype
from bmforge.nn.softcap import apply_softcap

__all__ = ["biased_attention"]

# Scores per tile. On a CPU 1 MiB of fp32 per thread fits into the L2 cache; an accelerator needs
# large matrix products.
_HOST_TILE_ELEMENTS = 1 << 18
_TILE_ELEMENTS = 1 << 26


def biased_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    mask: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """Return ``softmax(scale * q k^T + bias) v``; scores are capped before the bias is added.

    Args:
        query: queries.
        key: keys of N heads.
        value: values of N heads.
        bias: bias on the scaled scores, trained or not; -inf masks a key, but every query needs
            a key that is not masked. None means no bias.
        mask: boolean, True where a query attends.
        scale: factor on the scores; None means 1/sqrt(H).
        dropout: dropout probability of the attention weights.
        softcap: cap c of the scaled scores s, which become ``c * tanh(s / c)``; None means no cap.

    Shape:
        query: (B, N, T, H); key, value: (B, N, S, H); bias: (B or 1, N, T, S);
        mask: (B or 1, 1, T or 1, S); returns (B, N, T, H)

    Memory: one tile of scores; with dropout also one byte per weight, from forward to backward.
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if softcap is not None and torch.compiler.is_compiling():
        return _attend_whole(query, key, value, bias, mask, scale, dropout, softcap)
    wants_gradient = torch.is_grad_enabled() and bias is not None and bias.requires_grad
    if softcap is None and (torch.compiler.is_compiling() or not wants_gradient):
        assert bias is not None
        if mask is not None:
            bias = bias.masked_fill(~mask, -torch.inf)
        return F.scaled_dot_product_attention(query, key, value, bias, dropout, scale=scale)
    hidden = None if mask is None else ~mask
    return _BiasedAttention.apply(query, key, value, bias, hidden, scale, dropout, softcap)


def _attend_whole(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    scale: float,
    dropout: float,
    softcap: float,
) -> Tensor:
    """Compute attention with all scores at once, as one graph for `torch.compile`."""
    scores = apply_softcap(query @ key.transpose(2, 3) * scale, softcap)
    scores = scores if bias is None else scores + bias
    scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    weights = scores.to(accumulation_dtype(scores.dtype)).softmax(-1).to(value.dtype)
    return F.dropout(weights, dropout) @ value


class _Tile(NamedTuple):
    """One tile of scores: slices of sequences, heads and query tokens."""

    rows: slice
    heads: slice
    tokens: slice
    num_heads: int

    @property
    def size(self) -> tuple[int, ...]:
        """Number of sequences, heads and tokens in the tile."""
        return tuple(part.stop - part.start for part in self[:3])

    def cut(self, flat: Tensor) -> Tensor:
        """Select this tile's sequences and heads from a tensor (B * N, T or S, ...)."""
        first = self.rows.start * self.num_heads + self.heads.start
        rows, heads, _ = self.size
        return flat[first : first + rows * heads]

    def cut_shared(self, tensor: Tensor) -> Tensor:
        """Select this tile of a broadcastable (B or 1, N or 1, T or 1, S) tensor, and flatten."""
        tensor = tensor[:, :, self.tokens] if tensor.shape[2] > 1 else tensor
        tensor = tensor[:, self.heads] if tensor.shape[1] > 1 else tensor
        tensor = tensor[self.rows] if tensor.shape[0] > 1 else tensor
        return tensor.expand(*self.size[:2], *tensor.shape[2:]).flatten(0, 1)

    def put(self, target: Tensor, part: Tensor, tokens: slice, first: bool) -> None:
        """Write (if `first`) or add `part` to this tile of `target`, (B or 1, N, T, ...).

        If the target has batch size 1, the result is summed over the tile's sequences.
        """
        region = target[self.rows if target.shape[0] > 1 else slice(None), self.heads, tokens]
        part = part.unflatten(0, (-1, region.shape[1]))
        part = part if part.shape[0] == region.shape[0] else part.sum(0, keepdim=True)
        region.copy_(part) if first else region.add_(part)


def _tiles(query: Tensor, key: Tensor) -> Iterator[_Tile]:
    """Split the scores into tiles of bounded size: several sequences, some heads or some tokens.

    The loop over heads is outermost, so that a head's bias stays in the CPU cache for all
    sequences.
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
    """Flatten (B, N, T, H) to (B * N, T, H), contiguous, for faster batched products."""
    return [tensor.contiguous().flatten(0, 1) for tensor in tensors]


class _BiasedAttention(torch.autograd.Function):
    """Autograd function of attention that saves the dropout mask and recomputes the weights."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        hidden: Tensor | None,
        scale: float,
        dropout: float,
        softcap: float | None,
    ) -> Tensor:
        out = torch.empty_like(query)
        keep_mask: Tensor | None = None
        if dropout:
            shape = (*query.shape[:3], key.shape[2])
            keep_mask = torch.empty(shape, dtype=torch.bool, device=query.device).bernoulli_(
                1 - dropout
            )
        q, k, v = _flatten(query, key, value)
        for tile in _tiles(query, key):
            weights, _ = _make_weights(tile, q, k, bias, hidden, scale, softcap)
            if keep_mask is not None:
                weights.mul_(tile.cut_shared(keep_mask)).div_(1 - dropout)
            tile.put(out, torch.bmm(weights, tile.cut(v)), tile.tokens, first=True)
        ctx.save_for_backward(query, key, value, bias, hidden, keep_mask)
        ctx.scale, ctx.dropout, ctx.softcap = scale, dropout, softcap
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, hidden, keep_mask = ctx.saved_tensors
        out = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
        grad_query, grad_key, grad_value = out
        # The bias gradient is a sum over sequences, accumulated in fp32: in half precision it loses
        # terms.
        grad_bias: Tensor | None = None
        if ctx.needs_input_grad[3]:
            wide = torch.promote_types(bias.dtype, torch.float32)
            grad_bias = bias.new_empty(bias.shape, dtype=wide)
        q, k, v, grad_out = _flatten(query, key, value, grads[0])
        everything = slice(None)
        for tile in _tiles(query, key):
            weights, slope = _make_weights(tile, q, k, bias, hidden, ctx.scale, ctx.softcap)
            grad, tokens = tile.cut(grad_out)[:, tile.tokens], tile.tokens
            scores = torch.bmm(grad, tile.cut(v).transpose(1, 2))
            dropped_weights = weights
            if keep_mask is not None:
                factor = tile.cut_shared(keep_mask).to(weights.dtype).div_(1 - ctx.dropout)
                dropped_weights = weights * factor
                scores.mul_(factor)
            first = tokens.start == 0
            tile.put(
                grad_value, torch.bmm(dropped_weights.transpose(1, 2), grad), everything, first
            )
            scores = torch._softmax_backward_data(scores, weights, -1, weights.dtype)
            if grad_bias is not None:
                is_first_row = tile.rows.start == 0 or bias.shape[0] > 1
                tile.put(grad_bias, scores, tokens, is_first_row)
            if slope is not None:
                scores.mul_(slope)
            if ctx.scale != 1.0:
                scores.mul_(ctx.scale)
            tile.put(grad_query, torch.bmm(scores, tile.cut(k)), tokens, first=True)
            part = torch.bmm(scores.transpose(1, 2), tile.cut(q)[:, tokens])
            tile.put(grad_key, part, everything, first)
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return *out, grad_bias, None, None, None, None


def _make_weights(
    tile: _Tile,
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    hidden: Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor | None]:
    """Recompute a tile's attention weights, (sequences * heads, tokens, S).

    The inputs are flattened (`_flatten`). The second returned value is the derivative of the cap,
    of the same shape; None without a cap.
    """
    keys = tile.cut(key).transpose(1, 2)
    queries = tile.cut(query)[:, tile.tokens]
    slope: Tensor | None = None
    if softcap is None:
        assert bias is not None
        scores = torch.baddbmm(tile.cut_shared(bias), queries, keys, alpha=scale)
    else:
        scores = torch.bmm(queries, keys).mul_(scale / softcap).tanh_()
        slope = 1 - scores.square()
        scores.mul_(softcap)
        if bias is not None:
            scores += tile.cut_shared(bias)
    if hidden is not None:
        scores.masked_fill_(tile.cut_shared(hidden), -torch.inf)
    return scores.softmax(-1), slope

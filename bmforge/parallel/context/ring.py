"""Ring attention and tiled causal attention; neither keeps all keys or all scores in memory.

Softmax over all keys is the mean of softmaxes over subsets of keys, weighted by the exponentials of
their log-sum-exps. With the log-sum-exp over all keys, backward processes every tile independently.

On a CPU a fused kernel computes the tiles without mask and bias; the scores of all other tiles are
materialized, one tile at a time.

Source: Dao, "FlashAttention-2" (2023) for the tiles' backward; Liu et al., "Ring attention"
(2023).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from bmforge.parallel.context.token_share import Chunk, TokenShare

__all__ = ["attend_causally", "ring_attention", "attend_to_ends"]

_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _KeyTile(NamedTuple):
    """Queries of one chunk and the local keys that they attend to.

    Args:
        queries: chunk of the queries.
        keys: slice of the local keys.
        columns: positions of the keys in the sequence; None for prefix keys, which all queries
            attend to.
        diagonal: whether queries and keys are the same tokens, so that the tile has a causal mask;
            otherwise every query attends to every key.
    """

    queries: Chunk
    keys: slice
    columns: slice | None
    diagonal: bool


class _Scores(NamedTuple):
    """Inputs from which the attention scores of one tile are computed."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    bias: Tensor | None
    causal: bool
    scale: float

    @property
    def is_plain(self) -> bool:
        """True if the fused CPU kernel supports this tile."""
        return self.query.is_cpu and self.mask is None and self.bias is None

    def make(self) -> Tensor:
        """Return the materialized scores of a tile, (B, N, T, S)."""
        wide = torch.promote_types(self.query.dtype, torch.float32)
        scores = (self.query @ self.key.transpose(-1, -2)).to(wide) * self.scale
        if self.bias is not None:
            scores = scores + self.bias
        if self.mask is not None:
            scores = scores.masked_fill(~self.mask, -torch.inf)
        if self.causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        return scores


def _finite(total: Tensor) -> Tensor:
    """Replace -inf, the log-sum-exp over no keys, with 0 to avoid NaN differences."""
    return total.masked_fill(total == -torch.inf, 0.0)


def _attend(s: _Scores) -> tuple[Tensor, Tensor]:
    """Return the attention output (B, N, T, H) and the log-sum-exp of the scores (B, N, T)."""
    if s.is_plain:
        return _cpu_forward(s.query, s.key, s.value, 0.0, s.causal, scale=s.scale)
    scores = s.make()
    total = scores.logsumexp(-1)
    weights = (scores - _finite(total)[..., None]).exp()
    return weights.to(s.value.dtype) @ s.value, total


def _attend_backward(
    s: _Scores, grad: Tensor, out: Tensor, total: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute the gradients of a tile's query, key, value and scores.

    `out` and `total` are the attention output and the log-sum-exp over all keys.
    """
    if s.is_plain:
        back = _cpu_backward(
            grad, s.query, s.key, s.value, out, total, 0.0, s.causal, scale=s.scale
        )
        return *back, None
    weights = (s.make() - _finite(total)[..., None]).exp()
    pulled = (grad @ s.value.transpose(-1, -2)).to(weights.dtype)
    # FlashAttention-2: dS = P * (dP - rowsum(dO * O)), where O is the output over all keys.
    pulled = weights * (pulled - (grad * out).to(weights.dtype).sum(-1, keepdim=True))
    value = weights.to(grad.dtype).transpose(-1, -2) @ grad
    scores = (pulled * s.scale).to(s.query.dtype)
    return scores @ s.key, scores.transpose(-1, -2) @ s.query, value, pulled


class _TileAccumulator:
    """Accumulates the attention of one process's queries over tiles of keys and values.

    Shape:
        query: (B, N, local T, H); mask: (B or 1, 1, local T or 1, T); bias: (B or 1, N, local
            T, T);
        keys and values: (B, K, keys, 2 H), concatenated
    """

    def __init__(
        self, query: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float
    ) -> None:
        self.query, self.mask, self.bias, self.scale = query, mask, bias, scale
        self.wide = torch.promote_types(query.dtype, torch.float32)
        # In fp32: the output is rescaled once per tile, and 16-bit rounding would add up.
        self.out = torch.zeros_like(query, dtype=self.wide, memory_format=torch.contiguous_format)
        self.total = self.out.new_full(query.shape[:3], -torch.inf)

    def _scores(self, tile: _KeyTile, pair: Tensor) -> _Scores:
        own = tile.queries.own
        # The kernels need as many key heads as query heads.
        pair = pair[:, :, tile.keys].repeat_interleave(self.query.shape[1] // pair.shape[1], 1)
        key, value = pair.chunk(2, -1)
        mask, bias = (self.mask, self.bias) if tile.columns is not None else (None, None)
        if mask is not None:
            mask = mask[:, :, own if mask.shape[2] > 1 else slice(None), tile.columns]
        if bias is not None:
            bias = bias[:, :, own, tile.columns]
        query = self.query[:, :, own]
        return _Scores(query, key, value, mask, bias, tile.diagonal, self.scale)

    def add(self, tile: _KeyTile, pair: Tensor) -> None:
        """Merge the attention output of a tile into the accumulated output."""
        out, total = _attend(self._scores(tile, pair))
        own = tile.queries.own
        before = self.total[:, :, own]
        # Merge of two softmaxes: each output is weighted by its share of the joint sum of
        # exponentials.
        both = torch.logaddexp(before, total.to(self.wide))
        decay, new = ((t - _finite(both)).exp()[..., None] for t in (before, total.to(self.wide)))
        self.out[:, :, own] = self.out[:, :, own] * decay + out * new
        self.total[:, :, own] = both

    def start_backward(self, grad: Tensor, out: Tensor, total: Tensor) -> None:
        """Store the output gradient, the output and the log-sum-exp; zero the gradient buffers."""
        self.grad, self.out, self.total = grad, out, total
        self.grad_query = torch.zeros_like(self.query, dtype=self.wide)
        self.grad_bias = None if self.bias is None else torch.zeros_like(self.bias, dtype=self.wide)

    def add_backward(self, tile: _KeyTile, pair: Tensor, grad_pair: Tensor) -> None:
        """Accumulate the gradients of one tile; keys and values accumulate into `grad_pair`."""
        own = tile.queries.own
        results = (t[:, :, own] for t in (self.grad, self.out, self.total))
        query, key, value, scores = _attend_backward(self._scores(tile, pair), *results)
        self.grad_query[:, :, own] += query
        # Sum over the query heads that share a KV head.
        gradient = torch.cat((key, value), -1).unflatten(1, (pair.shape[1], -1)).sum(2)
        grad_pair[:, :, tile.keys] += gradient
        if self.grad_bias is not None and scores is not None and tile.columns is not None:
            columns = self.grad_bias[:, :, own, tile.columns]
            columns += scores if columns.shape[0] > 1 else scores.sum(0, keepdim=True)


def _tiles_of(share: TokenShare, source: int, causal: bool) -> Iterator[_KeyTile]:
    """Yield the tiles between this rank's queries and the keys of rank `source`."""
    for queries in share.mine:
        for keys in share.chunks_of(source):
            if not causal or keys.number <= queries.number:
                columns = slice(keys.start, keys.end)
                yield _KeyTile(queries, keys.own, columns, causal and keys.number == queries.number)


def _prefix_tiles(share: TokenShare, prefix: Tensor | None) -> Iterator[_KeyTile]:
    """Yield the tiles between this rank's queries and the prefix keys."""
    if prefix is None:
        return
    for queries in share.mine:
        yield _KeyTile(queries, slice(0, prefix.shape[2]), None, False)


def _causal_tiles(share: TokenShare, before: int) -> Iterator[_KeyTile]:
    """Yield two tiles per chunk of queries: all earlier keys, and the chunk's own keys.

    `before` is the number of prefix keys in front of the keys of the sequence.
    """
    for chunk in share.mine:
        for keys, diagonal in (
            (slice(0, before + chunk.start), False),
            (slice(before + chunk.start, before + chunk.end), True),
        ):
            if keys.stop > keys.start:
                yield _KeyTile(chunk, keys, keys, diagonal)


def attend_causally(query: Tensor, pair: Tensor, share: TokenShare, scale: float | None) -> Tensor:
    """Compute causal attention of this rank's queries over the keys and values of the sequence.

    Shape:
        query: (B, N, local T, H); pair: keys and values concatenated, (B, K, P + T, 2 H), with
        the P prefix positions, which all queries see, in front; returns (B, N, local T, H)
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if query.is_cpu:
        return _Causal.apply(query, pair, share, scale)
    return attend_to_ends(query, pair, share, scale)


def attend_to_ends(query: Tensor, pair: Tensor, share: TokenShare, scale: float) -> Tensor:
    """Compute `attend_causally` with kernels that align the last query with the last key.

    Accelerators have such kernels. On a CPU this method would materialize the whole mask, so
    `attend_causally` is used there.
    """
    from torch.nn.attention.bias import causal_lower_right  # imports torch._dynamo

    key, value = pair.chunk(2, -1)
    before = pair.shape[2] - share.length
    parts = [
        F.scaled_dot_product_attention(
            query[:, :, chunk.own],
            key[:, :, : before + chunk.end],
            value[:, :, : before + chunk.end],
            causal_lower_right(chunk.end - chunk.start, before + chunk.end),
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        for chunk in share.mine
    ]
    return torch.cat(parts, 2)


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, pair: Tensor, share: TokenShare, scale: float) -> Tensor:
        work = _TileAccumulator(query, None, None, scale)
        for tile in _causal_tiles(share, pair.shape[2] - share.length):
            work.add(tile, pair)
        out = work.out.to(query.dtype)
        ctx.save_for_backward(query, pair, out, work.total)
        ctx.share, ctx.scale = share, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        query, pair, out, total = ctx.saved_tensors
        work = _TileAccumulator(query, None, None, ctx.scale)
        work.start_backward(grads[0], out, total)
        grad_pair = torch.zeros_like(pair, dtype=work.wide)
        for tile in _causal_tiles(ctx.share, pair.shape[2] - ctx.share.length):
            work.add_backward(tile, pair, grad_pair)
        return work.grad_query.to(query.dtype), grad_pair.to(pair.dtype), None, None


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    share: TokenShare,
    causal: bool,
    scale: float | None,
    prefix: Tensor | None = None,
) -> Tensor:
    """Compute ring attention: each rank passes its keys and values on to the next rank.

    The keys and values of a prefix, which all queries see, are replicated.

    Shape:
        query: (B, N, local T, H); key, value: (B, K, local T, H); mask: (B or 1, 1, local T or
            1, T);
        bias: (B or 1, N, local T, T); prefix: (1, K, P, 2 H), keys and values concatenated;
        returns (B, N, local T, H)

    Memory: keys and values of two processes, and one tile of scores if there is a mask or bias.
    Comm: with R processes, R - 1 messages of the keys and values forward; in backward as many
        again, and R of their gradients, in fp32 or wider.
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    pair = share.pad(torch.cat((key, value), -1), 2)
    if prefix is not None:
        prefix = prefix.expand(pair.shape[0], -1, -1, -1)
    return _Ring.apply(query, pair, bias, prefix, mask, share, causal, scale)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        pair: Tensor,
        bias: Tensor | None,
        prefix: Tensor | None,
        mask: Tensor | None,
        share: TokenShare,
        causal: bool,
        scale: float,
    ) -> Tensor:
        work, moving = _TileAccumulator(query, mask, bias, scale), pair
        for tile in _prefix_tiles(share, prefix):
            work.add(tile, prefix)  # type: ignore[arg-type]
        for step in range(share.size):
            # Sent before the tiles are computed, so that the message travels meanwhile.
            coming = _Message(moving, share) if step + 1 < share.size else None
            for tile in _tiles_of(share, (share.rank - step) % share.size, causal):
                work.add(tile, moving)
            moving = moving if coming is None else coming.wait()
        out = work.out.to(query.dtype)
        ctx.save_for_backward(query, pair, bias, prefix, mask, out, work.total)
        ctx.share, ctx.causal, ctx.scale = share, causal, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, moving, bias, prefix, mask, out, total = ctx.saved_tensors
        share, pair = ctx.share, moving
        work = _TileAccumulator(query, mask, bias, ctx.scale)
        work.start_backward(grads[0], out, total)
        grad_prefix = None if prefix is None else torch.zeros_like(prefix, dtype=work.wide)
        for tile in _prefix_tiles(share, prefix):
            work.add_backward(tile, prefix, grad_prefix)
        arriving: _Message | None = None
        for step in range(share.size):
            coming = _Message(moving, share) if step + 1 < share.size else None
            key_gradient = torch.zeros_like(pair, dtype=work.wide)
            for tile in _tiles_of(share, (share.rank - step) % share.size, ctx.causal):
                work.add_backward(tile, moving, key_gradient)
            # The gradients from previous ranks travel behind their keys and values.
            key_gradient = key_gradient if arriving is None else key_gradient + arriving.wait()
            # `share.size` messages: the last one returns each gradient to the owner of the keys.
            arriving = _Message(key_gradient, share)
            moving = moving if coming is None else coming.wait()
        assert arriving is not None
        grad_bias = None if work.grad_bias is None else work.grad_bias.to(bias.dtype)
        grad_pair = arriving.wait().to(pair.dtype)
        grad_query = work.grad_query.to(query.dtype)
        grad_prefix = None if grad_prefix is None else grad_prefix.to(prefix.dtype)
        return grad_query, grad_pair, grad_bias, grad_prefix, None, None, None, None


class _Message:
    """Asynchronous send to the next rank and receive from the previous rank."""

    def __init__(self, tensor: Tensor, share: TokenShare) -> None:
        ranks = dist.get_process_group_ranks(share.group)
        after, before = (ranks[(share.rank + n) % share.size] for n in (1, -1))
        # Kept as attributes, because the backend reads `sent` until the exchange is complete.
        self.sent, self.received = tensor.contiguous(), torch.empty_like(tensor)
        # Posted together: if every process of the ring sent first, all would wait for a receiver.
        self.works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self.sent, after, share.group),
                dist.P2POp(dist.irecv, self.received, before, share.group),
            ]
        )

    def wait(self) -> Tensor:
        """Wait for the exchange and return the received tensor."""
        for work in self.works:
            work.wait()
        return self.received

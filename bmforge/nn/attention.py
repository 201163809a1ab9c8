"""Multi-head attention: grouped-query heads, rotary positions, cross-attention, KV cache.

There are three kernels: `host_attention` on a CPU with a C++ compiler, `biased_attention` for a
trained bias on the scores, and otherwise `F.scaled_dot_product_attention`. Masks are boolean, True
where a query attends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.nn.adapter_selection import weight_of
from bmforge.nn.alibi import alibi_bias, alibi_slopes
from bmforge.nn.attention_bias import biased_attention
from bmforge.nn.attention_mask import build_mask
from bmforge.nn.attention_spec import AttentionSpec
from bmforge.nn.host_attention import can_use_host_attention, host_attention
from bmforge.nn.linear import Linear
from bmforge.nn.norm import build_norm
from bmforge.nn.packed_linear import multiply_jointly
from bmforge.nn.position import apply_rope, narrow_rope
from bmforge.nn.prefix import Pair, attend_with_prefix, is_single_query, prepend_prefix
from bmforge.nn.quantized_rows import QuantizedRows
from bmforge.nn.shard_hooks import TensorFn, identity
from bmforge.nn.sinks import HeadSinks, add_sink_key

__all__ = [
    "Attention",
    "AttentionSpec",
    "KeyValueCache",
    "RunBlocks",
    "build_mask",
    "compute_attention",
]

# Signature of `compute_attention`.
AttentionFn = Callable[..., Tensor]


class RunBlocks(Protocol):
    """Function that runs a stack of blocks in one call, instead of `models.stack.run_layers`."""

    def __call__(
        self,
        layers: nn.ModuleDict,
        x: Tensor,
        masks: Mapping[int | None, Tensor | None],
        biases: Mapping[int, Tensor],
        inputs: dict[str, Any],
    ) -> Tensor | None:
        """Return the last block's output; None if the caller must run the blocks one by one."""

    def undisturbed(self) -> AbstractContextManager[None]:
        """Context manager in which repeated calls may assume that the blocks do not change."""


class KeyValueCache(Protocol):
    """KV cache of attention: `append` stores new keys and values and returns all stored ones."""

    # Number of prefix tokens before those that `length` counts; set before the first tokens.
    extra_length: int
    # Optional runner of all blocks in one call.
    step: RunBlocks | None
    # A cache may also have `attend`, as `PagedCache` has, for rows that pack several sequences.

    @property
    def length(self) -> int:
        """Number of tokens in the cache before this call."""

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store one layer's new keys and values; return the keys and values of all tokens.

        Shape:
            key, value: (B, K, T, H); returns two tensors (B, K, S, H)
        """

    def remember(
        self, layer: int, make: Callable[[], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values of cross-attention; `make` computes them once per layer."""

    def skip(self, tokens: int) -> None:
        """Advance the length by `tokens` if no layer of this stage stores keys and values."""


def compute_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
    dropout: float,
    prefix: Pair | None = None,
    softcap: float | None = None,
    slopes: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Compute attention: ``softmax(scale * q k^T + bias) v``.

    Args:
        query: queries.
        key: keys, with N heads or fewer (grouped-query attention).
        value: values, with as many heads as the keys.
        mask: boolean, True where a query attends; None means all keys or, with `causal`, the
            keys up to the query.
        causal: use causal attention if there is no mask and more than one query.
        bias: bias on the scores.
        scale: factor on the scores; None means 1/sqrt(H).
        dropout: dropout probability of the attention weights.
        prefix: keys and values of a prefix that every query of every sequence attends to.
        softcap: cap of the scaled scores; see `AttentionSpec`.
        slopes: function that returns the ALiBi slopes of the queries' heads, (N,); if given, the
            ALiBi bias is added.

    Shape:
        query: (B, N, T, H); key, value: (B, K, S, H); mask: (B or 1, 1, T or 1, S);
        bias: (B or 1, N, T, S); prefix: (K, P, H) each; returns (B, N, T, H)
    """
    if query.is_cpu and torch.is_autocast_enabled("cpu"):
        query, key, value = (_autocast(tensor) for tensor in (query, key, value))
        bias = None if bias is None else _autocast(bias)
    is_plain = bias is None and softcap is None and slopes is None
    if prefix is not None and is_plain and is_single_query(query, dropout):
        return attend_with_prefix(prefix, query, key, value, mask, scale)
    if prefix is not None:
        key, value, mask, bias = prepend_prefix(prefix, query, key, value, mask, bias, causal)
        causal = False
    if bias is not None and bias.shape[-1] > key.shape[2]:
        # The first columns are for the prefixes of other layers, which share the bias.
        bias = bias[..., -key.shape[2] :]
    if slopes is not None:
        if causal and mask is None and query.shape[2] > 1:
            shape = query.shape[2], key.shape[2]
            mask = key.new_ones(shape, dtype=torch.bool).tril(shape[1] - shape[0])[None, None]
        last = torch.arange(key.shape[2] - query.shape[2], key.shape[2], device=query.device)
        bias = alibi_bias(slopes(query), last, key.shape[2]).to(query.dtype)
    if bias is not None or softcap is not None:
        times = query.shape[1] // key.shape[1]
        if times > 1:
            key, value = (t.repeat_interleave(times, 1) for t in (key, value))
        if causal and bias is None and mask is None and query.shape[2] > 1:
            mask = key.new_ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()[None, None]
        return biased_attention(query, key, value, bias, mask, scale, dropout, softcap)
    # A branch, because a compiled graph with a free length needs a plain bool here.
    is_causal = True if causal and mask is None and query.shape[2] > 1 else False  # noqa: SIM210
    if can_use_host_attention(query, mask, (key, value)):
        return host_attention(query, key, value, mask, is_causal, scale, dropout)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _autocast(x: Tensor) -> Tensor:
    """Convert a CPU tensor as autocast does before torch's attention; fp64 stays fp64."""
    dtype = torch.get_autocast_dtype("cpu")
    return x if x.dtype == torch.float64 else x.to(dtype)


class Attention(nn.Module):
    """Multi-head attention with N query heads and K key-value heads of width H.

    Args:
        hidden_size: width D of the hidden states.
        spec: other hyperparameters of the layer.

    Attributes:
        input_fn: function applied to `x` first; set by layouts that shard the projections.
        memory_fn: function applied to `memory` first; set by the same layouts.
        attention_fn: attention function; set by layouts that shard heads or tokens.
        head_share: (index, count) of the local shard of heads; set by layouts.
        prefix: module that returns keys and values to prepend, or None; see `nn.prefix`.
        sinks: module with the sink logits of the heads, or None; see `nn.sinks`.

    Shape:
        x: (B, T, D) -> (B, T, D)
    """

    # RoPE rotates the first dims of every head of the queries and keys, and nothing else.
    rotates_heads = True

    def __init__(self, hidden_size: int, spec: AttentionSpec) -> None:
        super().__init__()
        self.layer_index = 0
        self.num_heads, self.head_share = spec.num_heads, (0, 1)
        self.head_dim, self.scale, self.dropout = spec.head_dim, spec.scale, spec.dropout
        self.causal, self.window, self.softcap = spec.causal, spec.window, spec.softcap
        self.rope_interleaved, self.rotary = spec.rope_interleaved, spec.rotary
        self.input_fn: TensorFn = identity
        self.memory_fn: TensorFn = identity
        self.attention_fn: AttentionFn = compute_attention
        self.alibi = spec.alibi
        if spec.softcap is not None:
            self.attention_fn = partial(compute_attention, softcap=spec.softcap)
        elif spec.alibi:
            self.attention_fn = partial(compute_attention, slopes=self.slopes)
        self.prefix: nn.Module | None = None
        self.sinks = HeadSinks(spec.num_heads) if spec.sinks else None
        self.q_norm = self.k_norm = None
        self.qk_norm_whole = spec.qk_norm_whole
        self.num_kv_heads = spec.num_kv_heads
        self._build_projections(hidden_size, spec)
        self.o_proj = Linear(spec.out_width, hidden_size, bias=spec.out_bias)

    def _build_projections(self, hidden_size: int, spec: AttentionSpec) -> None:
        """Build the projections to queries, keys and values, with their norms."""
        query_size, key_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = Linear(hidden_size, query_size, bias=spec.qkv_bias)
        self.k_proj = Linear(hidden_size, key_size, bias=spec.qkv_bias)
        self.v_proj = Linear(hidden_size, key_size, bias=spec.qkv_bias)
        if spec.qk_norm is not None:
            widths = (query_size, key_size) if spec.qk_norm_whole else (spec.head_dim,) * 2
            self.q_norm, self.k_norm = (build_norm(spec.qk_norm, width) for width in widths)

    def forward(
        self,
        x: Tensor | QuantizedRows,
        mask: Tensor | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        cache: KeyValueCache | None = None,
        bias: Tensor | None = None,
        memory: Tensor | None = None,
    ) -> Tensor:
        """Compute self-attention, or cross-attention if `memory` is given.

        Args:
            x: hidden states of the queries; may be quantized for the layers in `projections`.
            mask: boolean mask; None means causal attention, or full attention if the spec is
                not causal.
            rope: cos and sin of `rope_table`.
            cache: KV cache, to which this call appends; with `memory` it stores the keys and
                values of the memory.
            bias: bias on the scores.
            memory: encoder output for cross-attention; None means self-attention.

        Shape:
            mask: (B or 1, 1, T or 1, S); bias: (B or 1, N, T, S); memory: (B, S, D)
        """
        x = x if isinstance(x, QuantizedRows) else self.input_fn(x)
        if rope is not None:
            rope = narrow_rope(rope, self.head_dim, self.rope_interleaved)
        attend = getattr(cache, "attend", None)
        rotation: tuple[Tensor, Tensor, bool] | None = None
        if memory is not None:
            assert isinstance(x, Tensor)
            query = self._queries(x, rope)
            states = self.memory_fn(memory)

            def make() -> tuple[Tensor, Tensor]:
                return self._keys_and_values(states, None)

            key, value = make() if cache is None else cache.remember(self.layer_index, make)
        else:
            # The cache rotates whole heads itself, in the kernel that stores the keys.
            if attend is not None and self.rotates_heads and rope is not None:
                rotation, rope = (*rope, self.rope_interleaved), None
            query, key, value = self._project(x, rope)
            if cache is not None and attend is None:
                key, value = cache.append(self.layer_index, key, value)
        if attend is not None and memory is None:
            scale = (self.scale or self.head_dim**-0.5) if self.is_plain() else None
            arguments = self.layer_index, self.window, self._mix, query, key, value, scale
            mixed = attend(*arguments, rotation)
        else:
            mixed = self._mix(query, key, value, mask, bias)
        mixed = self._drop_padding(mixed)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def is_plain(self) -> bool:
        """Return True if the layer computes causal softmax attention and nothing else."""
        has_more = self.prefix is not None or self.sinks is not None or self.training
        return self.causal and not has_more and self.attention_fn is compute_attention

    def pick_heads(self, bias: Tensor) -> Tensor:
        """Return the first `num_heads` heads of a bias that layers of different widths share.

        With tensor parallelism, return the heads of this rank.

        Shape:
            bias: (B or 1, heads, T, S), heads of this rank or all heads of the widest layer
        """
        rank, size = self.head_share
        local_heads = self.num_heads // size
        return (
            bias
            if bias.shape[1] == local_heads
            else bias.narrow(1, rank * local_heads, local_heads)
        )

    def slopes(self, query: Tensor) -> Tensor:
        """Return the ALiBi slopes of this rank's query heads."""
        rank, size = self.head_share
        slopes, local = alibi_slopes(self.num_heads), self.num_heads // size
        own = slopes[rank * local : (rank + 1) * local]
        return torch.tensor(own, dtype=torch.float32, device=query.device)

    def _mix(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """Compute attention with the layer's dropout, scale, prefix and sinks.

        Shape:
            query: (B, N, T, H); key, value: (B, K, S, H); returns (B, N, T, H)
        """
        dropout = self.dropout if self.training else 0.0
        prefix = self.prefix
        pair = None if prefix is None or weight_of(prefix) == 0 else prefix()
        if self.sinks is not None:
            return self._mix_with_sinks(query, key, value, mask, bias, dropout, pair)
        arguments = (query, key, value, mask, bias, self.causal, self.scale, dropout)
        # Without a prefix the argument is omitted: a user's `attention_fn` need not support it.
        pairs = () if pair is None else (pair,)
        return self.attention_fn(*arguments, *pairs)

    def _mix_with_sinks(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        bias: Tensor | None,
        dropout: float,
        prefix: Pair | None,
    ) -> Tensor:
        """Compute attention with a sink logit per head; return (B, N, T, H)."""
        assert self.sinks is not None
        scale = self.scale or self.head_dim**-0.5
        sinks = self.sinks(*self.head_share)
        if (
            self.attention_fn is compute_attention
            and bias is None
            and is_single_query(query, dropout)
        ):
            return attend_with_prefix(prefix, query, key, value, mask, scale, sinks)
        wide = add_sink_key(sinks, query, key, value, prefix, scale)
        out = self.attention_fn(*wide[:3], mask, bias, self.causal, scale, dropout, wide[3])
        return out[..., : query.shape[-1]]

    def _project(
        self, x: Tensor | QuantizedRows, rope: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project hidden states to queries, keys and values, (B, heads, T, H) each."""
        projected = multiply_jointly(x, self.projections())
        query, key = map(self._heads, projected, (self.q_norm, self.k_norm))
        if rope is not None:
            query, key = (apply_rope(t, rope, self.rope_interleaved) for t in (query, key))
        return query, key, self._heads(projected[2], None)

    def projections(self) -> tuple[nn.Module, ...]:
        """Return the linear layers that are applied to `x`; they can share one quantized `x`."""
        return self.q_proj, self.k_proj, self.v_proj

    def _queries(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        """Project hidden states to queries, (B, N, T, H), with rotary positions."""
        query = self._heads(self.q_proj(x), self.q_norm)
        return query if rope is None else apply_rope(query, rope, self.rope_interleaved)

    def _drop_padding(self, mixed: Tensor) -> Tensor:
        """Return the heads' outputs, (B, N, T, H), unchanged; `LatentAttention` drops padding."""
        return mixed

    def _keys_and_values(
        self, x: Tensor, rope: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Project hidden states to keys and values, (B, K, S, H) each."""
        key = self._heads(self.k_proj(x), self.k_norm)
        if rope is not None:
            key = apply_rope(key, rope, self.rope_interleaved)
        return key, self._heads(self.v_proj(x), None)

    def _heads(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        """Split (B, T, heads * H) into (B, heads, T, H) and apply the optional norm."""
        if norm is not None and self.qk_norm_whole:
            x, norm = norm(x), None
        x = x.unflatten(-1, (-1, self.head_dim))
        return (x if norm is None else norm(x)).transpose(1, 2)

    def extra_repr(self) -> str:
        """Return the hyperparameters that the projections do not show, as text."""
        return f"head_dim={self.head_dim}, scale={self.scale}, dropout={self.dropout}"

"""Sliding-window attention with global tokens, at a cost linear in the length (Longformer).

Every token attends to the tokens within reach on both sides and to the global tokens; a global
token attends to all tokens, through its own projections. Queries are split into blocks, and the
keys of a block are an overlapping view of the sequence, so one call of the fused kernel computes
all blocks and no tensor has T^2 elements.

Source: Beltagy, Peters and Cohan, "Longformer: The Long-Document Transformer" (2020). The authors'
code and transformers compute the diagonals of the band; blocks compute slightly more and mask it,
which is faster with dense kernels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.nn.attention import Attention, AttentionSpec, KeyValueCache
from bmforge.nn.linear import Linear
from bmforge.nn.recompute import call_and_drop
from bmforge.nn.shard_hooks import TensorFn, identity
from bmforge.nn.window_mask import WindowMask

__all__ = ["WindowAttention"]


class WindowAttention(Attention):
    """Sliding-window attention with global tokens.

    Args:
        hidden_size: width D of the hidden states.
        spec: hyperparameters.

    Attributes:
        pick_own: function applied before the last projection; a layout that shards tokens sets
            it to select the tokens of its rank.

    Shape:
        x: (B, T, D) -> (B, T, D)

    Memory: linear in T; keys and values of blocks are views, or recomputed in backward.
    """

    def __init__(self, hidden_size: int, spec: AttentionSpec) -> None:
        super().__init__(hidden_size, spec)
        self.pick_own: TensorFn = identity
        size = spec.num_heads * spec.head_dim
        self.q_global_proj = Linear(hidden_size, size, bias=spec.qkv_bias)
        self.k_global_proj = Linear(hidden_size, size, bias=spec.qkv_bias)
        self.v_global_proj = Linear(hidden_size, size, bias=spec.qkv_bias)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        mask: WindowMask,
        rope: tuple[Tensor, Tensor] | None = None,
        cache: KeyValueCache | None = None,
        bias: Tensor | None = None,
        memory: Tensor | None = None,
    ) -> Tensor:
        """Attend within the window and to the global tokens.

        Args:
            x: hidden states.
            mask: result of `build_window_mask`.
            rope, cache, bias, memory: must be None.

        Raises:
            ConfigError: rope, cache, bias or memory is not None.
        """
        if not (rope is None and cache is None and bias is None and memory is None):
            raise ConfigError(
                "attention with global tokens does not support RoPE, a KV cache, a bias or "
                "cross-attention. Leave rope, cache, bias and memory out."
            )
        x = self.input_fn(x)
        query, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if mask.block:
            mixed = self._mix_blocks(query, key, value, mask)
        else:
            mixed = self._mix_whole(query, key, value, mask.allowed)
        if mask.real is not None:
            mixed = mixed * mask.real[..., None]
        if mask.chosen is not None:
            mixed = self._put_globals(mixed, x, mask)
        return self.o_proj(self.pick_own(mixed))

    def _mix_whole(
        self, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None
    ) -> Tensor:
        """Compute attention over whole sequences: (B, T, D)."""
        query, key, value = (self._heads(t, None) for t in (query, key, value))
        return self._mix(query, key, value, allowed, None).transpose(1, 2).flatten(2)

    def _mix_blocks(self, query: Tensor, key: Tensor, value: Tensor, mask: WindowMask) -> Tensor:
        """Compute attention block by block: (B, T, D)."""
        rows, length, _ = query.shape
        padding = -length % mask.block
        blocks = F.pad(query, (0, 0, 0, padding)).flatten(0, 1).unflatten(0, (-1, mask.block))
        heads = self._heads(blocks, None)

        def mix(keys: Tensor, values: Tensor) -> Tensor:
            return self._mix(heads, keys, values, mask.allowed, None)

        if mask.chosen is None:
            mixed = mix(self._in_reach(key, mask), self._in_reach(value, mask))
        else:
            # Blocks that contain the global tokens are copies, not views, so backward builds them
            # again.
            def keys() -> Tensor:
                return self._with_globals(key, mask)

            def values() -> Tensor:
                return self._with_globals(value, mask)

            block_values = values()
            mixed = call_and_drop(
                lambda near: call_and_drop(lambda far: mix(near, far), block_values, values),
                keys(),
                keys,
            )
        return mixed.transpose(1, 2).reshape(rows, length + padding, -1)[:, :length]

    def _in_reach(self, x: Tensor, mask: WindowMask) -> Tensor:
        """Return each block's keys as a view of (B, T, D): (B * blocks, N, block + 2 * reach, H).

        Sequences are concatenated, so the first block of a sequence overlaps the previous sequence;
        `allowed` masks these keys.
        """
        padding = -x.shape[1] % mask.block
        x = F.pad(x, (0, 0, 0, padding)) if padding else x
        wide = F.pad(x.flatten(0, 1), (0, 0, mask.reach, mask.reach))
        blocks = wide.unfold(0, mask.block + 2 * mask.reach, mask.block)
        return blocks.unflatten(1, (-1, self.head_dim)).movedim(-1, 2)

    def _with_globals(self, x: Tensor, mask: WindowMask) -> Tensor:
        """Prepend the global tokens to each block's keys."""
        assert mask.chosen is not None
        near = self._in_reach(x, mask)
        first = self._heads(_take(x, mask.chosen), None)
        first = first.repeat_interleave(near.shape[0] // x.shape[0], 0)
        return torch.cat((first, near), dim=2)

    def _put_globals(self, mixed: Tensor, x: Tensor, mask: WindowMask) -> Tensor:
        """Overwrite the outputs of the global tokens with their attention to all tokens."""
        assert mask.chosen is not None
        assert mask.is_chosen is not None
        query = self.q_global_proj(_take(x, mask.chosen))
        few = 2 * query.shape[1] * (query.shape[2] // self.head_dim) <= x.shape[2]
        plain = self.prefix is None and all(
            map(_is_plain, (self.k_global_proj, self.v_global_proj))
        )
        if few and plain:
            out = self._see_all_at_once(query, x, mask)
        else:
            keys, values = self.k_global_proj(x), self.v_global_proj(x)
            out = self._mix_whole(query, keys, values, mask.seen_by_chosen)
        # Slots of `chosen` without a global token keep their output.
        out = torch.where(mask.is_chosen[..., None], out, _take(mixed, mask.chosen))
        return mixed.scatter(1, mask.chosen[..., None].expand_as(out), out.to(mixed.dtype))

    def _see_all_at_once(self, query: Tensor, x: Tensor, mask: WindowMask) -> Tensor:
        """Compute the attention of G global tokens to all tokens: (B, G, N * H).

        All other tokens are not projected. The projections are applied to the few global tokens
        instead, with queries q and attention weights p: ``q (W x + b) = (q W) x + q b`` and
        ``p (W x + b) = W (p x) + b sum(p)``. This needs T x D x G x N instead of T x D x D
        products.
        """
        assert mask.seen_by_chosen is not None
        query = query.unflatten(-1, (-1, self.head_dim))
        key, value = (
            (proj.weight.unflatten(0, (-1, self.head_dim)), proj.bias)
            for proj in (self.k_global_proj, self.v_global_proj)
        )
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        folded = torch.einsum("bgnh,nhd->bngd", query * scale, key[0])
        scores = folded.flatten(1, 2) @ x.transpose(1, 2)
        scores = scores.unflatten(1, folded.shape[1:3])
        if key[1] is not None:
            bias = key[1].unflatten(0, (-1, self.head_dim))
            scores = scores + torch.einsum("bgnh,nh->bng", query * scale, bias)[..., None]
        weights = scores.masked_fill(~mask.seen_by_chosen, -torch.inf).softmax(-1)
        if self.dropout and self.training:
            weights = F.dropout(weights, self.dropout)
        summed = (weights.flatten(1, 2) @ x).unflatten(1, folded.shape[1:3])
        out = torch.einsum("bngd,nhd->bgnh", summed, value[0])
        if value[1] is not None:
            mass = weights.sum(-1).transpose(1, 2)[..., None]
            out = out + mass * value[1].unflatten(0, (-1, self.head_dim))
        return out.flatten(2)


def _is_plain(proj: nn.Linear) -> bool:
    """Return True for an unmodified projection: not quantized, not sharded, without adapters."""
    is_own = type(proj) is Linear and type(proj.weight) is nn.Parameter
    return is_own and not (proj._forward_hooks or proj._forward_pre_hooks)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Gather the tokens at `index` of every sequence: (B, T, D), (B, G) -> (B, G, D)."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))

"""Sliding-window attention with global tokens, at a cost linear in the length.

Every token sees those within reach to both sides and the global ones; a global token sees all, with
projections of its own. Queries are cut into blocks; a block's keys are an overlapping view of the
sequence, so that one call of the fused kernel serves all blocks and nothing grows with T^2.

Source: Beltagy, Peters and Cohan, "Longformer: The Long-Document Transformer" (2020). Where its
authors' code and transformers' compute the band's diagonals, blocks compute a little more than the
band and mask it, which dense kernels do faster.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.nn.attention import Attention, AttentionSpec, KeyValueCache
from bmforge.nn.cuts import Pass, pass_on
from bmforge.nn.linear import Linear
from bmforge.nn.remake import call_and_drop
from bmforge.nn.window_mask import WindowMask

__all__ = ["WindowAttention"]


class WindowAttention(Attention):
    """Attention within a window, and of and to global tokens.

    Args:
        hidden_size: D.
        spec: the heads and everything else.

    Attributes:
        pick_own: what goes into the last projection goes through it; a layout that divides tokens
            picks those whose results are wanted here.

    Shape:
        x: (B, T, D) -> (B, T, D)

    Memory: linear in T; keys and values of blocks are views, or made again in backward.
    """

    def __init__(self, hidden_size: int, spec: AttentionSpec) -> None:
        super().__init__(hidden_size, spec)
        self.pick_own: Pass = pass_on
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
        """Attend as `mask` says.

        Args:
            x: the tokens.
            mask: of `build_window_mask`.
            rope: must be None, as all that follow: an encoder with a window has none of them.
            cache: see `rope`.
            bias: see `rope`.
            memory: see `rope`.

        Raises:
            ConfigError: an argument that must be None.
        """
        if not (rope is None and cache is None and bias is None and memory is None):
            raise ConfigError("attention with global tokens takes no rope, cache, bias or memory.")
        x = self.enter(x)
        query, key, value = self.thin_query(self.q_proj(x)), self.k_proj(x), self.v_proj(x)
        if mask.block:
            mixed = self._mix_blocks(query, key, value, mask)
        else:
            mixed = self._mix_whole(query, key, value, mask.allowed)
        if mask.real is not None:
            mixed = mixed * mask.real[..., None]
        if mask.chosen is not None:
            mixed = self._put_globals(mixed, x, mask)
        return self.o_proj(self.thin_dims(self.thin(self.pick_own(mixed))))

    def _mix_whole(
        self, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None
    ) -> Tensor:
        """Weigh the values of whole rows: (B, T, D)."""
        query, key, value = (self._heads(t, None) for t in (query, key, value))
        return self._mix(query, key, value, allowed, None).transpose(1, 2).flatten(2)

    def _mix_blocks(self, query: Tensor, key: Tensor, value: Tensor, mask: WindowMask) -> Tensor:
        """Weigh the values, block by block: (B, T, D)."""
        rows, length, _ = query.shape
        rest = -length % mask.block
        blocks = F.pad(query, (0, 0, 0, rest)).flatten(0, 1).unflatten(0, (-1, mask.block))
        heads = self._heads(blocks, None)

        def mix(keys: Tensor, values: Tensor) -> Tensor:
            return self._mix(heads, keys, values, mask.allowed, None)

        if mask.chosen is None:
            mixed = mix(self._in_reach(key, mask), self._in_reach(value, mask))
        else:
            # Beside copies of the global tokens the blocks are no views; backward copies again.
            def keys() -> Tensor:
                return self._with_globals(key, mask)

            def values() -> Tensor:
                return self._with_globals(value, mask)

            made = values()
            mixed = call_and_drop(
                lambda near: call_and_drop(lambda far: mix(near, far), made, values), keys(), keys
            )
        return mixed.transpose(1, 2).reshape(rows, length + rest, -1)[:, :length]

    def _in_reach(self, x: Tensor, mask: WindowMask) -> Tensor:
        """View (B, T, D) as what each block reaches: (B * blocks, N, block + 2 * reach, H).

        Rows lie behind one another, so the first block of a row reaches into the row before;
        `allowed` says no there.
        """
        rest = -x.shape[1] % mask.block
        x = F.pad(x, (0, 0, 0, rest)) if rest else x
        wide = F.pad(x.flatten(0, 1), (0, 0, mask.reach, mask.reach))
        blocks = wide.unfold(0, mask.block + 2 * mask.reach, mask.block)
        return blocks.unflatten(1, (-1, self.head_dim)).movedim(-1, 2)

    def _with_globals(self, x: Tensor, mask: WindowMask) -> Tensor:
        """Put the global tokens in front of what each block reaches."""
        assert mask.chosen is not None
        near = self._in_reach(x, mask)
        first = self._heads(_take(x, mask.chosen), None)
        first = first.repeat_interleave(near.shape[0] // x.shape[0], 0)
        return torch.cat((first, near), dim=2)

    def _put_globals(self, mixed: Tensor, x: Tensor, mask: WindowMask) -> Tensor:
        """Overwrite the global tokens' rows with attention to everything."""
        assert mask.chosen is not None
        assert mask.is_chosen is not None
        query = self.thin_query(self.q_global_proj(_take(x, mask.chosen)))
        few = 2 * query.shape[1] * (query.shape[2] // self.head_dim) <= x.shape[2]
        plain = self.prefix is None and all(
            map(_is_plain, (self.k_global_proj, self.v_global_proj))
        )
        if few and plain:
            out = self._see_all_at_once(query, x, mask)
        else:
            keys, values = self.k_global_proj(x), self.v_global_proj(x)
            out = self._mix_whole(query, keys, values, mask.seen_by_chosen)
        # Places that hold no global token get back what is there.
        out = torch.where(mask.is_chosen[..., None], out, _take(mixed, mask.chosen))
        return mixed.scatter(1, mask.chosen[..., None].expand_as(out), out.to(mixed.dtype))

    def _see_all_at_once(self, query: Tensor, x: Tensor, mask: WindowMask) -> Tensor:
        """Attention of G tokens to all, without projecting all: (B, G, N * H).

        The products with a projection's weight are taken on the side of the few: ``q (W x + b) =
        (q W) x + q b`` and ``p (W x + b) = W (p x) + b sum(p)``. T x D x G N products instead of
        T x D x D.
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
    """Tell whether a projection's weight and bias are all that it does: not where it is stored
    otherwise, cut over processes, or has something beside it.
    """
    is_own = type(proj) is Linear and type(proj.weight) is nn.Parameter
    return is_own and not (proj._forward_hooks or proj._forward_pre_hooks)


def _take(x: Tensor, places: Tensor) -> Tensor:
    """Pick tokens of every row: (B, T, D), (B, G) -> (B, G, D)."""
    return x.gather(1, places[..., None].expand(-1, -1, x.shape[2]))

"""Multi-head attention: to itself or to a memory, with grouped keys and values, positions, a cache.

The kernel is `host_attention` on a CPU, where it can be compiled, and otherwise
`F.scaled_dot_product_attention`; a trained bias on the scores goes through `biased_attention`.
Masks are boolean, True where a query may look.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.errors import ShapeError
from bmforge.nn.biased import biased_attention
from bmforge.nn.cuts import Pass, pass_on
from bmforge.nn.host_attention import host_attention, takes_host_attention
from bmforge.nn.linear import Linear
from bmforge.nn.norm import RMSNorm
from bmforge.nn.position import apply_rope, narrow_rope
from bmforge.nn.prefix import Pair, mix_behind, put_before, takes_one

__all__ = ["Attention", "AttentionSpec", "KeyValueCache", "RunBlocks", "build_mask", "mix_values"]

# As `mix_values`.
Mix = Callable[..., Tensor]


@dataclass(frozen=True)
class AttentionSpec:
    """Everything in which attentions of different families differ.

    Args:
        num_heads: N.
        num_kv_heads: K, divides N.
        head_dim: H.
        qkv_bias: biases on q, k, v.
        out_bias: bias on o.
        scale: factor on the scores; None is 1/sqrt(H).
        dropout: of the attention weights, in training.
        causal: a token sees none after it, unless a mask says otherwise.
        window: a token sees only so many, itself included; None sees all.
        global_tokens: the window reaches to both sides, half of it to each, and some tokens see all
            and are seen by all, with projections of their own; see `window.py`.
        rope_interleaved: rotary pairs are neighbours instead of halves.
        qk_norm_eps: norm q and k per head with this epsilon; None leaves them.
        in_scale: factor on what goes into q, k and v, and
        out_scale: on what goes into o: 1/sqrt(width) in Tensor Programs' parametrisation (Yang et
            al. 2022); the block applies both.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = True
    out_bias: bool = True
    scale: float | None = None
    dropout: float = 0.0
    causal: bool = True
    window: int | None = None
    global_tokens: bool = False
    rope_interleaved: bool = False
    qk_norm_eps: float | None = None
    in_scale: float = 1.0
    out_scale: float = 1.0


class RunBlocks(Protocol):
    """Runs blocks one after the other, as `models.stack.run_layers` does."""

    def __call__(
        self,
        layers: nn.ModuleDict,
        x: Tensor,
        masks: Mapping[int | None, Tensor | None],
        biases: Mapping[int, Tensor],
        inputs: dict[str, Any],
    ) -> Tensor | None:
        """Return what comes out of the last; None where they must go one by one."""

    def undisturbed(self) -> AbstractContextManager[None]:
        """Return what nobody changes the blocks in, from one call to the next."""


class KeyValueCache(Protocol):
    """What attention needs of a cache: hand over new keys and values, get all of them back."""

    # Tokens of the model's own in front of those that `length` counts; set before the first ones.
    extra_length: int
    # What runs all blocks of a call in another way than one by one; None where nothing does.
    step: RunBlocks | None
    # A cache may also have `attend(layer, window, mix, query, key, value)`, which stores keys and
    # values and mixes them itself, for tokens of several sequences in one row.

    @property
    def length(self) -> int:
        """Number of tokens in the cache before this call."""

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store (B, K, T, H) tensors of one layer; return (B, K, S, H) with the past in front."""

    def remember(
        self, layer: int, make: Callable[[], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values of a memory, made once per layer."""

    def skip(self, tokens: int) -> None:
        """Count new tokens that no layer here stores, as none of them has attention."""


def mix_values(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
    dropout: float,
    prefix: Pair | None = None,
) -> Tensor:
    """Weigh the values by what queries and keys have in common.

    Args:
        query: of the tokens that ask.
        key: of those that are asked.
        value: of the same.
        mask: True where a query may look; None is all, or
        causal: up to itself, where there are several queries.
        bias: added to the scores.
        scale: factor on the scores; None is 1/sqrt(H).
        dropout: of the weights.
        prefix: keys and values that stand before those of all rows, and that all queries see.

    Shape:
        query: (B, N, T, H); key, value: (B, K, S, H); mask: (B or 1, 1, T or 1, S);
        bias: (B or 1, N, T, S); prefix: (K, P, H) each; returns (B, N, T, H)
    """
    if prefix is not None and bias is None and takes_one(query, dropout):
        return mix_behind(prefix, query, key, value, mask, scale)
    if prefix is not None:
        key, value, mask, bias = put_before(prefix, query, key, value, mask, bias, causal)
        causal = False
    if bias is not None:
        times = query.shape[1] // key.shape[1]
        if times > 1:
            key, value = (t.repeat_interleave(times, 1) for t in (key, value))
        return biased_attention(query, key, value, bias, mask, scale, dropout)
    # A branch, because a compiled graph with a free length needs a plain bool here.
    is_causal = False
    if causal and mask is None and query.shape[2] > 1:
        is_causal = True
    if takes_host_attention(query, mask):
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


def build_mask(
    batch: tuple[int, int],
    device: torch.device,
    *,
    past: int = 0,
    attention_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    prefix_lengths: Tensor | None = None,
) -> Tensor | None:
    """Return the mask for T new tokens after `past` cached ones, or None where none is needed.

    None means plain causal attention, or all of it when `causal` is off.

    Args:
        batch: (B, T).
        device: where the mask lives.
        past: number of cached tokens in front.
        attention_mask: 1 for real tokens, 0 for padding.
        document_ids: packed rows: a token sees only tokens of its own document.
        causal: a token sees none after it.
        window: causal only; a token sees only so many, itself included.
        prefix_lengths: causal only; every token sees the first so many.

    Shape:
        attention_mask: (B, past + T)
        document_ids: (B, T), only without a past
        prefix_lengths: (B,)
        returns: (B or 1, 1, T or 1, past + T), True where a query may look
    """
    _, length = batch
    narrow = window is not None and past + length > window
    is_plain = attention_mask is None and document_ids is None and prefix_lengths is None
    if is_plain and not narrow and (not causal or past == 0 or length == 1):
        return None
    _check_mask_shapes(batch, past, attention_mask, document_ids)
    query = torch.arange(past, past + length, device=device)[:, None]
    key = torch.arange(past + length, device=device)[None, :]
    mask = key <= query if causal else torch.ones_like(key, dtype=torch.bool)
    if narrow and window is not None:
        mask = mask & (key > query - window)
    mask = mask[None, None]
    if prefix_lengths is not None:
        mask = mask | (key < prefix_lengths[:, None, None, None])
    if attention_mask is not None:
        seen = attention_mask[:, None, None, :].bool()
        # A padding query has nothing to look at; looking at itself keeps its softmax finite.
        mask = mask & seen | (key == query)[None, None] if causal else seen
    if document_ids is not None:
        mask = mask & (document_ids[:, None, :, None] == document_ids[:, None, None, :])
    # As above: what has nothing at all to look at, such as a row of padding, looks at everything.
    return mask if causal else mask | ~mask.any(-1, keepdim=True)


def _check_mask_shapes(
    batch: tuple[int, int], past: int, attention_mask: Tensor | None, document_ids: Tensor | None
) -> None:
    """Refuse masks that would broadcast to a wrong meaning."""
    rows, length = batch
    wanted = {"attention_mask": (rows, past + length), "document_ids": (rows, length)}
    for name, tensor in (("attention_mask", attention_mask), ("document_ids", document_ids)):
        if tensor is not None and tuple(tensor.shape) != wanted[name]:
            raise ShapeError(
                f"{name} is {tuple(tensor.shape)}; with {length} new and {past} cached tokens "
                f"it must be {wanted[name]}."
            )
    if document_ids is not None and past:
        raise ShapeError("document_ids belong to training rows; they cannot be used with a cache.")


class Attention(nn.Module):
    """Attention over N query and K key-value heads of width H.

    Args:
        hidden_size: D.
        spec: the heads and everything else.

    Attributes:
        enter: what `x`, and
        enter_memory: what `memory` goes through first, and
        mix: what weighs the values; a layout that cuts heads or tokens puts its own here.
        thin: what the heads' results, side by side, go through before `o_proj`: a gate of heads.
        thin_dims: likewise, after it, and
        thin_query: what queries go through before they are turned: a gate of heads' width.
        head_share: which share of the heads is here, and how many shares there are; likewise.
        prefix: None, or a module that returns keys and values to put before all others; see
            `nn.prefix`.

    Shape:
        x: (B, T, D) -> (B, T, D)
    """

    def __init__(self, hidden_size: int, spec: AttentionSpec) -> None:
        super().__init__()
        self.layer_index = 0
        self.num_heads, self.head_share = spec.num_heads, (0, 1)
        self.head_dim, self.scale, self.dropout = spec.head_dim, spec.scale, spec.dropout
        self.causal, self.window = spec.causal, spec.window
        self.rope_interleaved = spec.rope_interleaved
        self.enter: Pass = pass_on
        self.enter_memory: Pass = pass_on
        self.mix: Mix = mix_values
        self.thin: Pass = pass_on
        self.thin_dims: Pass = pass_on
        self.thin_query: Pass = pass_on
        query_size, key_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = Linear(hidden_size, query_size, bias=spec.qkv_bias)
        self.k_proj = Linear(hidden_size, key_size, bias=spec.qkv_bias)
        self.v_proj = Linear(hidden_size, key_size, bias=spec.qkv_bias)
        self.o_proj = Linear(query_size, hidden_size, bias=spec.out_bias)
        self.prefix: nn.Module | None = None
        self.q_norm = self.k_norm = None
        if spec.qk_norm_eps is not None:
            self.q_norm = RMSNorm(spec.head_dim, spec.qk_norm_eps)
            self.k_norm = RMSNorm(spec.head_dim, spec.qk_norm_eps)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        cache: KeyValueCache | None = None,
        bias: Tensor | None = None,
        memory: Tensor | None = None,
    ) -> Tensor:
        """Attend from every token to those that `mask` allows.

        Args:
            x: the tokens that ask.
            mask: boolean; None is plain causal, or everything where the spec is not causal.
            rope: cos and sin of `rope_table`.
            cache: keys and values of earlier tokens, which this call extends; with `memory`, of it.
            bias: added to the scores.
            memory: attend to these instead of to `x`.

        Shape:
            mask: (B or 1, 1, T or 1, S); bias: (B or 1, N, T, S); memory: (B, S, D)
        """
        x = self.enter(x)
        if rope is not None:
            rope = narrow_rope(rope, self.head_dim, self.rope_interleaved)
        attend = getattr(cache, "attend", None)
        query = self._heads(self.thin_query(self.q_proj(x)), self.q_norm)
        if memory is not None:
            kept = self.enter_memory(memory)

            def make() -> tuple[Tensor, Tensor]:
                return self._keys_and_values(kept, None)

            key, value = make() if cache is None else cache.remember(self.layer_index, make)
        else:
            key, value = self._keys_and_values(x, rope)
            if cache is not None and attend is None:
                key, value = cache.append(self.layer_index, key, value)
        if rope is not None:
            query = apply_rope(query, rope, self.rope_interleaved)
        if attend is not None and memory is None:
            mixed = attend(self.layer_index, self.window, self._mix, query, key, value)
        else:
            mixed = self._mix(query, key, value, mask, bias)
        return self.o_proj(self.thin_dims(self.thin(mixed.transpose(1, 2).flatten(2))))

    def pick_heads(self, bias: Tensor) -> Tensor:
        """Return this layer's part of a bias that several layers share: that of the first heads.

        Of heads that are cut over processes it is the part of those here.

        Shape:
            bias: (B or 1, heads, T, S), of the heads here or of all heads of the widest layer
        """
        number, count = self.head_share
        here = self.num_heads // count
        return bias if bias.shape[1] == here else bias.narrow(1, number * here, here)

    def _mix(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """Weigh the values: (B, N, T, H)."""
        dropout = self.dropout if self.training else 0.0
        given = (query, key, value, mask, bias, self.causal, self.scale, dropout)
        # Without one as before: a program's own `mix` need not know of prefixes.
        prefix = self.prefix
        if prefix is None or getattr(prefix, "share", 1) == 0:
            return self.mix(*given)
        return self.mix(*given, prefix())

    def _keys_and_values(
        self, x: Tensor, rope: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Project to keys and values: (B, K, S, H) each."""
        key = self._heads(self.k_proj(x), self.k_norm)
        if rope is not None:
            key = apply_rope(key, rope, self.rope_interleaved)
        return key, self._heads(self.v_proj(x), None)

    def _heads(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        """Split (B, T, heads * H) into (B, heads, T, H), normed per head where there is a norm."""
        x = x.unflatten(-1, (-1, self.head_dim))
        return (x if norm is None else norm(x)).transpose(1, 2)

    def extra_repr(self) -> str:
        """Show what is not visible in the projections."""
        return f"head_dim={self.head_dim}, scale={self.scale}, dropout={self.dropout}"

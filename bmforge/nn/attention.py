"""Multi-head attention with grouped keys and values, rotary positions and a cache.

The kernel is `F.scaled_dot_product_attention`. Masks are boolean, True where a query may look.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.errors import ShapeError
from bmforge.nn.norm import RMSNorm
from bmforge.nn.position import apply_rope

__all__ = ["Attention", "KeyValueCache", "build_mask"]


class KeyValueCache(Protocol):
    """What attention needs of a cache: hand over new keys and values, get all of them back."""

    @property
    def length(self) -> int:
        """Number of tokens in the cache before this call."""

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store (B, K, T, H) tensors of one layer; return (B, K, S, H) with the past in front."""


def build_mask(
    batch: tuple[int, int],
    device: torch.device,
    *,
    past: int = 0,
    attention_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
) -> Tensor | None:
    """Return the causal mask for T new tokens after `past` cached ones, or None when plain causal
    does.

    Args:
        batch: (B, T).
        device: where the mask lives.
        past: number of cached tokens in front.
        attention_mask: 1 for real tokens, 0 for padding.
        document_ids: packed rows: a token sees only tokens of its own document.

    Shape:
        attention_mask: (B, past + T)
        document_ids: (B, T), only without a past
        returns: (B or 1, 1, T, past + T), True where a query may look
    """
    _, length = batch
    if attention_mask is None and document_ids is None and (past == 0 or length == 1):
        return None
    _check_mask_shapes(batch, past, attention_mask, document_ids)
    query = torch.arange(past, past + length, device=device)[:, None]
    key = torch.arange(past + length, device=device)[None, :]
    mask = (key <= query)[None, None]
    if attention_mask is not None:
        # A padding query has nothing to look at; looking at itself keeps its softmax finite.
        mask = mask & attention_mask[:, None, None, :].bool() | (key == query)[None, None]
    if document_ids is not None:
        mask = mask & (document_ids[:, None, :, None] == document_ids[:, None, None, :])
    return mask


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
    """Causal self-attention over N query and K key-value heads of width H.

    Args:
        hidden_size: D.
        heads: (N, K, H); K divides N.
        qkv_bias: biases on q, k and v.
        out_bias: bias on o.
        scale: factor on the scores; None means 1/sqrt(H).
        dropout: of the attention weights, in training.
        rope_interleaved: which pairs a rotary table turns.
        qk_norm_eps: norm q and k per head with this epsilon; None leaves them.

    Shape:
        x: (B, T, D) -> (B, T, D)
    """

    def __init__(
        self,
        hidden_size: int,
        heads: tuple[int, int, int],
        qkv_bias: bool,
        out_bias: bool,
        scale: float | None = None,
        dropout: float = 0.0,
        rope_interleaved: bool = False,
        qk_norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        num_heads, num_kv_heads, self.head_dim = heads
        self.layer_index = 0
        self.scale = scale
        self.dropout = dropout
        self.rope_interleaved = rope_interleaved
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=qkv_bias)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=out_bias)
        has_norm = qk_norm_eps is not None
        self.q_norm = RMSNorm(self.head_dim, qk_norm_eps) if has_norm else None  # type: ignore[arg-type]
        self.k_norm = RMSNorm(self.head_dim, qk_norm_eps) if has_norm else None  # type: ignore[arg-type]

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Attend from every token to itself and those before it that `mask` allows.

        Args:
            x: (B, T, D).
            mask: (B or 1, 1, T, S) boolean; None is plain causal.
            rope: cos and sin of `rope_table`.
            cache: keys and values of earlier tokens, which this call extends.
        """
        query, key, value = self._heads(x)
        if rope is not None:
            query = apply_rope(query, rope, self.rope_interleaved)
            key = apply_rope(key, rope, self.rope_interleaved)
        if cache is not None:
            key, value = cache.append(self.layer_index, key, value)
        # A branch, because a compiled graph with a free length needs a plain bool here.
        is_causal = False
        if mask is None and query.shape[2] > 1:
            is_causal = True
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=is_causal,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project to heads: (B, N, T, H), (B, K, T, H), (B, K, T, H)."""
        query = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        key = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        value = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def extra_repr(self) -> str:
        """Show what is not visible in the projections."""
        return f"head_dim={self.head_dim}, scale={self.scale}, dropout={self.dropout}"

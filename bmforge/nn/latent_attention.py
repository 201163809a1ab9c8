"""Multi-head latent attention (MLA): keys and values are projected from a latent of each token.

RoPE is applied to the trailing dims of each query and key, but not to the first ones; all heads
share the trailing dims of the keys. The cache stores the expanded keys and values, so that every
kernel and cache for standard attention can be used; values are padded with zeros to the width of
the keys.

Source: DeepSeek-AI, "DeepSeek-V2" (arXiv 2405.04434), section 2.1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bmforge.errors import ConfigError
from bmforge.nn.attention import Attention
from bmforge.nn.attention_spec import AttentionSpec
from bmforge.nn.linear import Linear
from bmforge.nn.norm import build_norm
from bmforge.nn.position import apply_rope
from bmforge.nn.quantized_rows import QuantizedRows

__all__ = ["LatentAttention"]


class LatentAttention(Attention):
    """Attention with projections through latents; `spec.head_dim` is the width of a key.

    Args:
        hidden_size: width D of the hidden states.
        spec: hyperparameters, with `latent`.

    Shape:
        x: (B, T, D) -> (B, T, D)
    """

    rotates_heads = False

    def _build_projections(self, hidden_size: int, spec: AttentionSpec) -> None:
        """Build the projections to the latents and from them to queries, keys and values."""
        latent = spec.latent
        assert latent is not None
        self.latent = latent
        self.plain_dim = spec.head_dim - latent.rope_dim
        if spec.num_kv_heads != spec.num_heads or not 0 < latent.value_dim <= spec.head_dim:
            raise ConfigError(
                "latent attention needs num_kv_heads equal to num_heads, and value_dim from 1 to "
                f"head_dim: num_heads={spec.num_heads}, num_kv_heads={spec.num_kv_heads}, "
                f"head_dim={spec.head_dim}, value_dim={latent.value_dim}."
            )
        self.q_a_proj = self.q_a_norm = None
        size = spec.num_heads * spec.head_dim
        if latent.q_rank:
            self.q_a_proj = Linear(hidden_size, latent.q_rank, bias=latent.bias)
            self.q_a_norm = build_norm(latent.norm, latent.q_rank)
            self.q_b_proj = Linear(latent.q_rank, size, bias=False)
        else:
            self.q_proj = Linear(hidden_size, size, bias=False)
        self.kv_a_proj = Linear(hidden_size, latent.kv_rank + latent.rope_dim, bias=latent.bias)
        self.kv_a_norm = build_norm(latent.norm, latent.kv_rank)
        width = spec.num_heads * (self.plain_dim + latent.value_dim)
        self.kv_b_proj = Linear(latent.kv_rank, width, bias=False)

    def _project(
        self, x: Tensor | QuantizedRows, rope: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project hidden states to queries, keys and values, (B, N, T, H) each."""
        assert isinstance(x, Tensor)
        return self._queries(x, rope), *self._keys_and_values(x, rope)

    def _queries(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        """Project hidden states to queries, (B, N, T, H), and apply RoPE to their trailing dims."""
        if self.q_a_proj is None or self.q_a_norm is None:
            query = self.q_proj(x)
        else:
            query = self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))
        query = self._heads(query, None)
        if rope is None:
            return query
        plain, rotated = query.split((self.plain_dim, self.latent.rope_dim), -1)
        return torch.cat((plain, apply_rope(rotated, rope, self.rope_interleaved)), -1)

    def _keys_and_values(
        self, x: Tensor, rope: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Project hidden states to keys and padded values, (B, N, S, H) each."""
        compressed = self.kv_a_proj(x)
        latent, rotated = compressed.split((self.latent.kv_rank, self.latent.rope_dim), -1)
        expanded = self.kv_b_proj(self.kv_a_norm(latent))
        expanded = expanded.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        plain, value = expanded.split((self.plain_dim, self.latent.value_dim), -1)
        rotated = rotated.unsqueeze(1)
        if rope is not None:
            rotated = apply_rope(rotated, rope, self.rope_interleaved)
        key = torch.cat((plain, rotated.expand(-1, self.num_heads, -1, -1)), -1)
        return key, F.pad(value, (0, self.head_dim - self.latent.value_dim))

    def _drop_padding(self, mixed: Tensor) -> Tensor:
        """Drop the zero padding of the heads' outputs; return (B, N, T, value_dim)."""
        return mixed[..., : self.latent.value_dim]

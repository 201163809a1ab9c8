"""The one transformer block; families differ in the data of its `BlockSpec`, not in subclasses."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.nn.attention import Attention, KeyValueCache
from bmforge.nn.mlp import MLP
from bmforge.nn.norm import NormKind, build_norm
from bmforge.nn.remake import call_and_drop

__all__ = ["Block", "BlockSpec"]


@dataclass(frozen=True)
class BlockSpec:
    """Everything in which blocks of different families differ.

    Args:
        hidden_size: D.
        intermediate_size: F.
        num_heads: N.
        num_kv_heads: K, divides N.
        head_dim: H.
        norm: kind of norm, in front of each part.
        norm_eps: its epsilon.
        activation: name in `nn.mlp.ACTIVATIONS`.
        gated: gated MLP.
        qkv_bias: biases on q, k, v.
        out_bias: bias on o.
        mlp_bias: biases in the MLP.
        attn_scale: factor on attention scores; None is 1/sqrt(H).
        attn_dropout: dropout of attention weights.
        residual_dropout: dropout on what a part adds to the residual.
        rope_interleaved: rotary pairs are neighbours.
        qk_norm_eps: norm q and k per head with this epsilon.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm: NormKind = "layer"
    norm_eps: float = 1e-5
    activation: str = "gelu"
    gated: bool = False
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    attn_scale: float | None = None
    attn_dropout: float = 0.0
    residual_dropout: float = 0.0
    rope_interleaved: bool = False
    qk_norm_eps: float | None = None


class Block(nn.Module):
    """Attention and MLP with pre-norms: ``x + attn(norm(x))``, then ``x + mlp(norm(x))``.

    Args:
        spec: the block's data.
        layer_index: its place in the stack, which names its part of a cache.

    Shape:
        x: (B, T, D) -> (B, T, D)
    """

    def __init__(self, spec: BlockSpec, layer_index: int) -> None:
        super().__init__()
        self.dropout = spec.residual_dropout
        self.attn_norm = build_norm(spec.norm, spec.hidden_size, spec.norm_eps)
        self.attn = Attention(
            spec.hidden_size,
            (spec.num_heads, spec.num_kv_heads, spec.head_dim),
            spec.qkv_bias,
            spec.out_bias,
            spec.attn_scale,
            spec.attn_dropout,
            spec.rope_interleaved,
            spec.qk_norm_eps,
        )
        self.attn.layer_index = layer_index
        self.mlp_norm = build_norm(spec.norm, spec.hidden_size, spec.norm_eps)
        self.mlp = MLP(
            spec.hidden_size, spec.intermediate_size, spec.activation, spec.gated, spec.mlp_bias
        )

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Run one layer; the arguments are those of `Attention.forward`."""
        attended = call_and_drop(
            lambda normed: self.attn(normed, mask, rope, cache),
            self.attn_norm(x),
            lambda: self.attn_norm(x),
        )
        y = x + self._drop(attended)
        return y + self._drop(call_and_drop(self.mlp, self.mlp_norm(y), lambda: self.mlp_norm(y)))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x

"""Hyperparameters of attention layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from bmforge.nn.norm import NormSpec

__all__ = ["AttentionSpec", "LatentSpec"]


@dataclass(frozen=True)
class LatentSpec:
    """Sizes of multi-head latent attention (MLA); see `latent_attention.py`.

    Args:
        kv_rank: width of the latent from which the keys and values of all heads are projected.
        q_rank: width of the latent from which queries are projected; 0 projects the input.
        rope_dim: number of trailing dims of each query and key to which RoPE is applied; all heads
            share these dims of the keys.
        value_dim: width of a head's values, at most that of its keys.
        bias: biases on the projections to the latents.
        norm: norm of the latents.
    """

    kv_rank: int
    q_rank: int
    rope_dim: int
    value_dim: int
    bias: bool = False
    norm: NormSpec = field(default_factory=lambda: NormSpec("rms", 1e-6))


@dataclass(frozen=True)
class AttentionSpec:
    """Hyperparameters of an attention layer.

    Args:
        num_heads: number N of query heads.
        num_kv_heads: number K of key-value heads, which divides N.
        head_dim: width H of a head.
        qkv_bias: biases on q, k, v.
        out_bias: bias on o.
        scale: factor on the scores; None means 1/sqrt(H).
        dropout: dropout probability of the attention weights in training.
        causal: a token attends only to earlier tokens and itself, unless a mask overrides this.
        window: number of tokens that a token attends to, itself included; None means no limit. A
            layer that is not causal attends to that many on each side.
        global_tokens: use Longformer attention: a bidirectional window, half on each side, and
            global tokens that attend to all tokens through their own projections; see `window.py`.
        rope_interleaved: pair adjacent dims in rotary embeddings, not the two halves of a head.
        qk_norm: norm of q and k, per head; None means no norm.
        qk_norm_whole: the norm of q and k covers all heads at once (OLMo 2).
        rotary: rotary table of the layer: "model" (`DecoderSpec.rope`), "local"
            (`DecoderSpec.local_rope`) or "none".
        softcap: cap c of the scores s, which become ``c * tanh(s / c)`` (Gemma 2); None means no
            cap.
        alibi: add a bias to the scores that falls linearly with the distance between query and key
            (Press et al., "Train Short, Test Long", 2022); needs `causal`.
        sinks: a trained logit per head in the denominator of the softmax (gpt-oss).
        latent: sizes of multi-head latent attention (MLA); None means standard attention.
        in_scale: factor on the input of q, k and v, applied by the block.
        out_scale: factor on the input of o, applied by the block; 1/sqrt(width) in muP (Yang et
            al., "Tensor Programs V", 2022).
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
    qk_norm: NormSpec | None = None
    qk_norm_whole: bool = False
    rotary: Literal["model", "local", "none"] = "model"
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    latent: LatentSpec | None = None
    in_scale: float = 1.0
    out_scale: float = 1.0

    @property
    def out_width(self) -> int:
        """Number of input features of the output projection."""
        width = self.head_dim if self.latent is None else self.latent.value_dim
        return self.num_heads * width

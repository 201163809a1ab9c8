"""The transformer block; model families differ only in their `BlockSpec`, not in subclasses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.nn.attention import Attention, AttentionSpec, KeyValueCache
from bmforge.nn.device_kernels import can_use_device_kernels
from bmforge.nn.latent_attention import LatentAttention
from bmforge.nn.mlp import MLP, MLPSpec
from bmforge.nn.moe import MoE, MoESpec
from bmforge.nn.norm import NormSpec, RMSNorm, build_norm
from bmforge.nn.packed_linear import quantize_norm
from bmforge.nn.quantized_rows import QuantizedRows
from bmforge.nn.recompute import call_and_drop, capture_weights
from bmforge.nn.shard_hooks import TensorFn, identity
from bmforge.nn.window import WindowAttention
from bmforge.surgery import wrappers_of

__all__ = ["Block", "BlockSpec", "NormPlace", "Residual"]

NormPlace = Literal["pre", "post", "parallel", "parallel_norms", "output", "sandwich"]


@dataclass(frozen=True)
class BlockSpec:
    """Hyperparameters of a transformer block.

    Args:
        hidden_size: width D of the hidden states.
        attn: self-attention; None if it was pruned together with its norm.
        mlp: feed-forward sublayer, an MLP or a mixture of experts; None if it was pruned.
        cross_attn: attention to the encoder's output, in decoders of encoder-decoder models.
        norm: kind, epsilon and bias of the norms.
        norm_place: "pre": ``x + f(norm(x))``; "post": ``norm(x + f(x))``; "parallel": attention
            and MLP both read the output of `attn_norm`, and their outputs are added (GPT-J);
            "parallel_norms": the same, but the MLP reads the output of `mlp_norm` (GPT-NeoX);
            "output": ``x + norm(f(x))`` (OLMo 2); "sandwich": ``x + out_norm(f(norm(x)))``
            (Gemma 2), with the norms `attn_out_norm` and `mlp_out_norm`.
        norms_attn: whether attention has a norm; False if it reads `x` itself (the first block of
            ModernBERT).
        residual_dropout: dropout probability of a sublayer's output.
        residual_scale: factor on a sublayer's output.
        sum_scale: factor on the residual stream after each residual addition.
        guards_half: clamp the residual stream to the range of fp16 if it is fp16.
        layer_drop: probability of skipping the block in training (Fan et al., "LayerDrop", 2019).
    """

    hidden_size: int
    attn: AttentionSpec | None
    mlp: MLPSpec | MoESpec | None
    cross_attn: AttentionSpec | None = None
    norm: NormSpec = field(default_factory=NormSpec)
    norm_place: NormPlace = "pre"
    norms_attn: bool = True
    residual_dropout: float = 0.0
    residual_scale: float = 1.0
    sum_scale: float = 1.0
    guards_half: bool = False
    layer_drop: float = 0.0


class Residual(nn.Module):
    """Residual connection of a sublayer, with its norms, scales and dropout.

    The sublayer and the norms belong to the block and are arguments of the forward. A wrapper of
    the forward (`surgery.wrap_forward_`) can change the effect of the sublayer on hidden states.

    Args:
        spec: hyperparameters of the block.
        part: hyperparameters of the sublayer, of which `in_scale` is applied here; None means an
            `in_scale` of 1.

    Shape:
        x: (B, T, D) -> (B, T, D)
    """

    def __init__(
        self, spec: BlockSpec, part: AttentionSpec | MLPSpec | MoESpec | None = None
    ) -> None:
        super().__init__()
        self.norm_place, self.dropout = spec.norm_place, spec.residual_dropout
        self.sum_scale, self.guards_half = spec.sum_scale, spec.guards_half
        self.in_scale = 1.0 if part is None else part.in_scale
        # The last projection is linear, so its factor is applied to its output, the smaller tensor.
        self.out_scale = spec.residual_scale * (1.0 if part is None else part.out_scale)

    def forward(
        self,
        x: Tensor,
        part: Callable[[Tensor], Tensor],
        norm: nn.Module | None,
        out_norm: nn.Module | None = None,
    ) -> Tensor:
        """Add a sublayer's output to hidden states; return it alone in parallel blocks.

        Args:
            x: hidden states.
            part: sublayer.
            norm: norm of the sublayer's input or output; None if `x` is already normalized.
            out_norm: norm of the output in "sandwich" blocks.
        """
        if norm is None:
            return self._run(x, part)
        if self.norm_place == "post":
            return norm(_times(x + self._run(x, part), self.sum_scale))
        is_output = self.norm_place == "output"
        added = norm(self._run(x, part)) if is_output else self._run_on_norm(x, part, norm)
        if self.norm_place == "parallel_norms":
            return added
        added = added if out_norm is None else out_norm(added)
        x = _times(x + added, self.sum_scale)
        return _clamp_half(x) if self.guards_half else x

    def _run(self, x: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        return self._dropout_and_scale(part(_times(x, self.in_scale)))

    def _run_on_norm(self, x: Tensor, part: Callable[[Tensor], Tensor], norm: nn.Module) -> Tensor:
        """Return a sublayer's output for the norm of `x`; backward recomputes the norm.

        `x` must therefore not be changed in place before backward.
        """
        factor = self.in_scale
        if not torch.is_grad_enabled():
            return self._dropout_and_scale(part(_times(norm(x), factor)))
        again = capture_weights(norm)
        added = call_and_drop(part, _times(norm(x), factor), lambda: _times(again(x), factor))
        return self._dropout_and_scale(added)

    def _dropout_and_scale(self, x: Tensor) -> Tensor:
        """Apply residual dropout and residual scale if configured."""
        x = F.dropout(x, self.dropout, self.training) if self.dropout else x
        return _times(x, self.out_scale)


class Block(nn.Module):
    """Transformer block: self-attention, optional cross-attention and MLP, norms and residuals.

    Args:
        spec: hyperparameters.
        layer_index: index of the block in the stack, and initially in the KV cache.

    Attributes:
        sync_random: function that makes all ranks that share a sequence use the same random
            number; set by layouts.

    Shape:
        x: (B, T, D) -> (B, T, D); a mixture of experts also returns the router logits, (B * T, E)
    """

    def __init__(self, spec: BlockSpec, layer_index: int) -> None:
        super().__init__()
        self.spec = spec
        self.norm_place = spec.norm_place
        self.dropout, self.layer_drop = spec.residual_dropout, spec.layer_drop
        self.sum_scale, self.guards_half = spec.sum_scale, spec.guards_half
        self.sync_random: TensorFn = identity
        self.attn: Attention | None = None
        if spec.attn is not None or (spec.norm_place == "parallel" and spec.mlp is not None):
            norm = build_norm(spec.norm, spec.hidden_size) if spec.norms_attn else nn.Identity()
            self.attn_norm = norm
        self.attn_out_norm: nn.Module | None = None
        self.mlp_out_norm: nn.Module | None = None
        if spec.norm_place == "sandwich":
            if spec.attn is not None:
                self.attn_out_norm = build_norm(spec.norm, spec.hidden_size)
            if spec.mlp is not None:
                self.mlp_out_norm = build_norm(spec.norm, spec.hidden_size)
        if spec.attn is not None:
            self.attn = _build_attention(spec.hidden_size, spec.attn)
            self.attn.layer_index = layer_index
            self.attn_residual = Residual(spec, spec.attn)
        self.cross_attn = None
        if spec.cross_attn is not None:
            self.cross_attn_norm = build_norm(spec.norm, spec.hidden_size)
            self.cross_attn = Attention(spec.hidden_size, spec.cross_attn)
            self.cross_attn.layer_index = layer_index
            self.cross_attn_residual = Residual(spec)
        if spec.norm_place != "parallel" and spec.mlp is not None:
            self.mlp_norm = build_norm(spec.norm, spec.hidden_size)
        self.mlp: MLP | MoE | None = None
        if isinstance(spec.mlp, MoESpec):
            self.mlp = MoE(spec.hidden_size, spec.mlp)
        elif spec.mlp is not None:
            self.mlp = MLP(spec.hidden_size, spec.mlp)
        if spec.mlp is not None:
            self.mlp_residual = Residual(spec, spec.mlp)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        cache: KeyValueCache | None = None,
        bias: Tensor | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Run the block on hidden states.

        Args:
            x: hidden states.
            mask: mask of the self-attention, see `Attention.forward`.
            rope: cos and sin of `rope_table`.
            cache: KV cache.
            bias: bias on the scores of the self-attention.
            memory: encoder output that `cross_attn` attends to, (B, S, D).
            memory_mask: True for tokens of `memory` that may be attended to, (B, 1, 1, S); None
                means all.
        """

        attn, cross_attn, mlp = self.attn, self.cross_attn, self.mlp
        router_logits: list[Tensor] = []

        def attend(value: Tensor | QuantizedRows) -> Tensor:
            assert attn is not None
            return attn(value, mask, rope, cache, bias)

        def attend_memory(value: Tensor) -> Tensor:
            assert cross_attn is not None
            return cross_attn(value, memory_mask, None, cache, None, memory)

        def feed(value: Tensor | QuantizedRows) -> Tensor:
            assert mlp is not None
            out = mlp(value)
            if isinstance(out, tuple):
                router_logits.append(out[1])
                return out[0]
            return out

        before = x = _clamp_half(x) if self.guards_half else x
        if self.norm_place == "parallel":
            x = self._run_parallel(x, attend, feed)
        elif self.norm_place == "parallel_norms":
            x = self._run_parallel_norms(x, attend, feed)
        elif cache is not None and self._adds_and_norms(x):
            x = self._run_fused(x, attend, feed)
        else:
            if attn is not None:
                x = self.attn_residual(x, attend, self.attn_norm, self.attn_out_norm)
            if cross_attn is not None:
                x = self.cross_attn_residual(x, attend_memory, self.cross_attn_norm)
            if mlp is not None:
                x = self.mlp_residual(x, feed, self.mlp_norm, self.mlp_out_norm)
        x = self._keep_or_drop(before, x)
        return (x, router_logits[0]) if router_logits else x

    def _run_parallel(
        self, x: Tensor, attend: Callable[[Tensor], Tensor], feed: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Add the outputs of attention and MLP to `x`; both read the same norm of `x`."""

        def both(value: Tensor) -> Tensor:
            added = []
            if self.attn is not None:
                added.append(self.attn_residual(value, attend, None))
            if self.mlp is not None:
                added.append(self.mlp_residual(value, feed, None))
            return added[0] if len(added) == 1 else added[0] + added[1]

        if self.attn is None and self.mlp is None:
            return x
        again = capture_weights(self.attn_norm)
        added = call_and_drop(both, self.attn_norm(x), lambda: again(x))
        return _times(x + added, self.sum_scale)

    def _run_parallel_norms(
        self, x: Tensor, attend: Callable[[Tensor], Tensor], feed: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Add the outputs of attention and MLP to `x`; each reads its own norm of `x`."""
        added = x
        if self.attn is not None:
            added = added + self.attn_residual(x, attend, self.attn_norm)
        if self.mlp is not None:
            added = added + self.mlp_residual(x, feed, self.mlp_norm)
        return _times(added, self.sum_scale)

    def _run_fused(
        self, x: Tensor, attend: Callable[[Any], Tensor], feed: Callable[[Any], Tensor]
    ) -> Tensor:
        """Run a pre-norm block with one kernel for the first addition and the MLP's norm."""
        norm: Any = self.mlp_norm
        ready = quantize_norm(x, None, self.attn_norm, self.attn)
        attended = attend(self.attn_norm(x) if ready is None else ready[1])
        both = quantize_norm(attended, x, norm, self.mlp)
        if both is None:
            both = torch.ops.bmforge.add_rms_norm(attended, x, norm.weight, norm.eps)
        return both[0] + feed(both[1])

    def _adds_and_norms(self, x: Tensor) -> bool:
        """Return True if one kernel can add the attention output to `x` and apply the next norm."""
        norm: Any = getattr(self, "mlp_norm", None)
        if type(norm) is not RMSNorm or norm.offset or not can_use_device_kernels(x, norm.weight):
            return False
        if self.norm_place != "pre" or self.training or self.guards_half:
            return False
        if self.attn is None or self.cross_attn is not None:
            return False
        parts = norm, self.attn_residual, self.mlp_residual
        if any(m._forward_hooks or m._forward_pre_hooks or wrappers_of(m) for m in parts):
            return False
        factors = {f for part in parts[1:] for f in (part.in_scale, part.out_scale)}
        return {*factors, self.sum_scale} == {1.0}

    def _keep_or_drop(self, before: Tensor, after: Tensor) -> Tensor:
        """Return `before` instead of `after` with the probability `layer_drop` (LayerDrop).

        The block is computed in both cases, because other ranks wait for its collectives.
        """
        if not self.layer_drop or not self.training:
            return after
        sample = self.sync_random(torch.rand((), device=before.device))
        return torch.where(sample < self.layer_drop, before, after)


def _build_attention(hidden_size: int, spec: AttentionSpec) -> Attention:
    """Build the attention layer of the kind that the spec describes."""
    if spec.global_tokens:
        return WindowAttention(hidden_size, spec)
    return (Attention if spec.latent is None else LatentAttention)(hidden_size, spec)


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


def _clamp_half(x: Tensor) -> Tensor:
    """Clamp hidden states to the range of fp16 if they are fp16: sums and casts can overflow."""
    if x.dtype != torch.float16:
        return x
    limit = torch.finfo(x.dtype).max
    return x.clamp(-limit, limit)

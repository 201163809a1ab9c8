"""The transformer block; model families differ only in their `BlockSpec`, not in subclasses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.nn.attention import Attention, AttentionSpec, KeyValueCache
from bmforge.nn.device_kernels import takes_device_kernels
from bmforge.nn.latent_attention import LatentAttention
from bmforge.nn.mlp import MLP, MLPSpec
from bmforge.nn.moe import MoE, MoESpec
from bmforge.nn.norm import NormSpec, RMSNorm, build_norm
from bmforge.nn.recompute import call_and_drop, hold_weights
from bmforge.nn.shard_hooks import Pass, pass_on
from bmforge.nn.window import WindowAttention

__all__ = ["Block", "BlockSpec", "NormPlace", "Weigh"]

NormPlace = Literal["pre", "post", "parallel", "parallel_norms", "output", "sandwich"]

# (x before a sublayer, x after it) -> input of the next sublayer
Weigh = Callable[[Tensor, Tensor], Tensor]


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


class Block(nn.Module):
    """Transformer block: self-attention, optional cross-attention and MLP, norms and residuals.

    Args:
        spec: hyperparameters.
        layer_index: index of the block in the stack, and initially in the KV cache.

    Attributes:
        agree: function that makes all ranks that share a sequence use the same random number; set
            by layouts.
        attn_share: pruning gate of attention and its norm, a function (x before, x after) -> x;
            or None.
        mlp_share: pruning gate of the MLP, of the same form; or None.
        block_share: pruning gate of the whole block, of the same form; or None. In parallel
            blocks the gates of the sublayers are applied to the added terms.

    Shape:
        x: (B, T, D) -> (B, T, D); a mixture of experts also returns the router logits, (B * T, E)
    """

    def __init__(self, spec: BlockSpec, layer_index: int) -> None:
        super().__init__()
        self.spec = spec
        self.norm_place = spec.norm_place
        self.dropout, self.scale = spec.residual_dropout, spec.residual_scale
        self.sum_scale, self.layer_drop = spec.sum_scale, spec.layer_drop
        self.guards_half = spec.guards_half
        self.agree: Pass = pass_on
        self.attn_share: Weigh | None = None
        self.mlp_share: Weigh | None = None
        self.block_share: Weigh | None = None
        self.attn_scales, self.mlp_scales = _scales(spec.attn), _scales(spec.mlp)
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
        self.cross_attn = None
        if spec.cross_attn is not None:
            self.cross_attn_norm = build_norm(spec.norm, spec.hidden_size)
            self.cross_attn = Attention(spec.hidden_size, spec.cross_attn)
            self.cross_attn.layer_index = layer_index
        if spec.norm_place != "parallel" and spec.mlp is not None:
            self.mlp_norm = build_norm(spec.norm, spec.hidden_size)
        self.mlp: MLP | MoE | None = None
        if isinstance(spec.mlp, MoESpec):
            self.mlp = MoE(spec.hidden_size, spec.mlp)
        elif spec.mlp is not None:
            self.mlp = MLP(spec.hidden_size, spec.mlp)

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

        router_logits: list[Tensor] = []

        def attend(value: Tensor) -> Tensor:
            assert self.attn is not None
            return self.attn(value, mask, rope, cache, bias)

        def feed(value: Tensor) -> Tensor:
            assert self.mlp is not None
            out = self.mlp(value)
            if isinstance(out, tuple):
                router_logits.append(out[1])
                return out[0]
            return out

        before = x = self._guard(x)
        if self.norm_place == "parallel":
            x = x if self.attn is None and self.mlp is None else self._run_parallel(x, attend, feed)
        elif self.norm_place == "parallel_norms":
            x = self._run_parallel_norms(x, attend, feed)
        else:
            x = self._run_parts(x, attend, feed, cache, memory, memory_mask)
        x = self._keep_or_drop(before, _weigh(self.block_share, before, x))
        return (x, router_logits[0]) if router_logits else x

    def _run_parts(
        self,
        x: Tensor,
        attend: Callable[[Tensor], Tensor],
        feed: Callable[[Tensor], Tensor],
        cache: KeyValueCache | None,
        memory: Tensor | None,
        memory_mask: Tensor | None,
    ) -> Tensor:
        """Run the sublayers one after the other."""
        if cache is not None and self._adds_and_norms(x):
            attended = attend(self.attn_norm(x))
            norm: Any = self.mlp_norm
            x, normed = torch.ops.bmforge.add_rms_norm(attended, x, norm.weight, norm.eps)
            return x + feed(normed)
        if self.attn is not None:
            added = self._add(x, self.attn_norm, attend, self.attn_scales, self.attn_out_norm)
            x = _weigh(self.attn_share, x, added)
        if self.cross_attn is not None:
            cross = self.cross_attn
            x = self._add(
                x,
                self.cross_attn_norm,
                lambda value: cross(value, memory_mask, None, cache, None, memory),
            )
        if self.mlp is None:
            return x
        added = self._add(x, self.mlp_norm, feed, self.mlp_scales, self.mlp_out_norm)
        return _weigh(self.mlp_share, x, added)

    def _adds_and_norms(self, x: Tensor) -> bool:
        """Return True if one kernel can add the attention output and apply the MLP's norm."""
        norm: Any = getattr(self, "mlp_norm", None)
        if type(norm) is not RMSNorm or norm.offset:
            return False
        if norm._forward_hooks or norm._forward_pre_hooks:
            return False
        has_both = self.attn is not None and self.mlp is not None and self.cross_attn is None
        is_plain = has_both and self.norm_place == "pre" and not self.training
        factors = {self.scale, self.sum_scale, *self.attn_scales, *self.mlp_scales}
        is_plain = is_plain and factors == {1.0} and not self.guards_half
        is_plain = is_plain and self.attn_out_norm is None and self.mlp_out_norm is None
        has_gates = self.attn_share is not None or self.mlp_share is not None
        return is_plain and not has_gates and takes_device_kernels(x, norm.weight)

    def _add(
        self,
        x: Tensor,
        norm: nn.Module,
        part: Callable[[Tensor], Tensor],
        scales: tuple[float, float] = (1.0, 1.0),
        out_norm: nn.Module | None = None,
    ) -> Tensor:
        """Add the output of one sublayer to the residual stream, with norms before or after."""
        into, out = scales
        if self.norm_place == "post":
            return norm(_times(x + self._shrink(part(_times(x, into)), out), self.sum_scale))
        if self.norm_place == "output":
            added = norm(self._shrink(part(_times(x, into)), out))
            return self._guard(_times(x + added, self.sum_scale))
        read = self._read(x, norm, part, scales)
        added = x + (read if out_norm is None else out_norm(read))
        return self._guard(_times(added, self.sum_scale))

    def _guard(self, x: Tensor) -> Tensor:
        """Clamp the residual stream if it is fp16, where sums and casts can overflow."""
        if not self.guards_half or x.dtype != torch.float16:
            return x
        limit = torch.finfo(x.dtype).max
        return x.clamp(-limit, limit)

    def _run_parallel(
        self, x: Tensor, attend: Callable[[Tensor], Tensor], feed: Callable[[Tensor], Tensor]
    ) -> Tensor:
        (attn_in, attn_out), (mlp_in, mlp_out) = self.attn_scales, self.mlp_scales

        def both(value: Tensor) -> Tensor:
            added = []
            if self.attn is not None:
                attended = self._shrink(attend(_times(value, attn_in)), attn_out)
                added.append(_weigh_alone(self.attn_share, attended))
            if self.mlp is not None:
                fed = self._shrink(feed(_times(value, mlp_in)), mlp_out)
                added.append(_weigh_alone(self.mlp_share, fed))
            return added[0] if len(added) == 1 else added[0] + added[1]

        again = hold_weights(self.attn_norm)
        added = call_and_drop(both, self.attn_norm(x), lambda: again(x))
        return _times(x + added, self.sum_scale)

    def _run_parallel_norms(
        self, x: Tensor, attend: Callable[[Tensor], Tensor], feed: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Add the outputs of attention and MLP, each of which reads its own norm of `x`."""
        added = x
        if self.attn is not None:
            attended = self._read(x, self.attn_norm, attend, self.attn_scales)
            added = added + _weigh_alone(self.attn_share, attended)
        if self.mlp is not None:
            fed = self._read(x, self.mlp_norm, feed, self.mlp_scales)
            added = added + _weigh_alone(self.mlp_share, fed)
        return _times(added, self.sum_scale)

    def _read(
        self,
        x: Tensor,
        norm: nn.Module,
        part: Callable[[Tensor], Tensor],
        scales: tuple[float, float],
    ) -> Tensor:
        """Return a sublayer's output for the norm of `x`; backward recomputes the norm.

        `x` must therefore not be changed in place before backward.
        """
        into, out = scales
        again = hold_weights(norm)
        read = call_and_drop(part, _times(norm(x), into), lambda: _times(again(x), into))
        return self._shrink(read, out)

    def _keep_or_drop(self, before: Tensor, after: Tensor) -> Tensor:
        """Return `before` instead of `after` with the probability `layer_drop` (LayerDrop).

        The block is computed in both cases, because other ranks wait for its collectives.
        """
        if not self.layer_drop or not self.training:
            return after
        sample = self.agree(torch.rand((), device=before.device))
        return torch.where(sample < self.layer_drop, before, after)

    def _shrink(self, x: Tensor, out_scale: float) -> Tensor:
        """Apply residual dropout and residual scale if configured."""
        x = F.dropout(x, self.dropout, self.training) if self.dropout else x
        return _times(x, self.scale * out_scale)


def _build_attention(hidden_size: int, spec: AttentionSpec) -> Attention:
    """Build the attention layer of the kind that the spec describes."""
    if spec.global_tokens:
        return WindowAttention(hidden_size, spec)
    return (Attention if spec.latent is None else LatentAttention)(hidden_size, spec)


def _weigh(share: Weigh | None, before: Tensor, after: Tensor) -> Tensor:
    return after if share is None else share(before, after)


def _weigh_alone(share: Weigh | None, added: Tensor) -> Tensor:
    return added if share is None else share(torch.zeros_like(added), added)


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


def _scales(part: AttentionSpec | MLPSpec | MoESpec | None) -> tuple[float, float]:
    """Return a sublayer's `in_scale` and `out_scale`; (1, 1) if there is no sublayer."""
    if part is None:
        return 1.0, 1.0
    # The last projection is linear, so its factor is applied to its output, the smaller tensor.
    return part.in_scale, part.out_scale

"""The one transformer block; families differ in the data of its `BlockSpec`, not in subclasses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.nn.attention import Attention, AttentionSpec, KeyValueCache
from bmforge.nn.cuts import Pass, pass_on
from bmforge.nn.mlp import MLP, MLPSpec
from bmforge.nn.moe import MoE, MoESpec
from bmforge.nn.norm import NormSpec, build_norm
from bmforge.nn.remake import call_and_drop, hold_weights
from bmforge.nn.window import WindowAttention

__all__ = ["Block", "BlockSpec", "Weigh"]

# (x before a part of a block, x after it) -> what goes on
Weigh = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class BlockSpec:
    """Everything in which blocks of different families differ.

    Args:
        hidden_size: D.
        attn: self-attention; None in a layer that lost it to pruning, its norm with it.
        mlp: feed-forward part, of one MLP or of experts; None likewise.
        cross_attn: attention to a memory, in decoders of encoder-decoders.
        norm: kind, epsilon and bias of the norms.
        norm_place: "pre": ``x + f(norm(x))``; "post": ``norm(x + f(x))``; "parallel": one norm
            (`attn_norm`), and attention and MLP side by side.
        residual_dropout: dropout on what a part adds to the residual.
        residual_scale: factor on what a part adds to the residual.
        sum_scale: factor on the residual after a part was added.
        guards_half: a residual in fp16 that leaves its range stays at the range's end.
        layer_drop: how often training leaves the whole block out (Fan et al., "LayerDrop", 2019).
    """

    hidden_size: int
    attn: AttentionSpec | None
    mlp: MLPSpec | MoESpec | None
    cross_attn: AttentionSpec | None = None
    norm: NormSpec = field(default_factory=NormSpec)
    norm_place: Literal["pre", "post", "parallel"] = "pre"
    residual_dropout: float = 0.0
    residual_scale: float = 1.0
    sum_scale: float = 1.0
    guards_half: bool = False
    layer_drop: float = 0.0


class Block(nn.Module):
    """Attention, attention to a memory where there is one, and MLP, each with its norm.

    Args:
        spec: the block's data.
        layer_index: its place in the stack, which names its part of a cache until layers that lack
            attention make it another.

    Attributes:
        agree: what is drawn for whole rows goes through it: processes that share them draw alike; a
            layout puts its own here.
        attn_share: None, or what takes x before and after attention to itself, its norm included,
            and says what goes on: a gate of this half;
        mlp_share: likewise of the MLP, and
        block_share: of the whole block. Where the parts stand side by side, a half is what it adds.

    Shape:
        x: (B, T, D) -> (B, T, D), and with experts the router's logits (B * T, E)
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
        self.attn: Attention | WindowAttention | None = None
        if spec.attn is not None or (spec.norm_place == "parallel" and spec.mlp is not None):
            self.attn_norm = build_norm(spec.norm, spec.hidden_size)
        if spec.attn is not None:
            attention = WindowAttention if spec.attn.global_tokens else Attention
            self.attn = attention(spec.hidden_size, spec.attn)
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
        """Run one layer.

        Args:
            x: hidden states.
            mask: as in `Attention.forward`, for the self-attention.
            rope: as there.
            cache: as there.
            bias: as there.
            memory: what `cross_attn` attends to, (B, S, D).
            memory_mask: which of it, (B, 1, 1, S); None is all.
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
        """Run the parts one after the other."""
        if self.attn is not None:
            added = self._add(x, self.attn_norm, attend, self.attn_scales)
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
        return _weigh(self.mlp_share, x, self._add(x, self.mlp_norm, feed, self.mlp_scales))

    def _add(
        self,
        x: Tensor,
        norm: nn.Module,
        part: Callable[[Tensor], Tensor],
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> Tensor:
        """Add one part to the residual, its norm before it or after the sum."""
        into, out = scales
        if self.norm_place == "post":
            return norm(_times(x + self._shrink(part(_times(x, into)), out), self.sum_scale))

        again = hold_weights(norm)

        def enter() -> Tensor:
            return _times(again(x), into)

        # `enter` runs again in backward, so its `x` must stay what it is.
        added = x + self._shrink(call_and_drop(part, _times(norm(x), into), enter), out)
        return self._guard(_times(added, self.sum_scale))

    def _guard(self, x: Tensor) -> Tensor:
        """Keep fp16 finite: a wide residual that a layout narrows on its way in, and its sums."""
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

    def _keep_or_drop(self, before: Tensor, after: Tensor) -> Tensor:
        """Leave the block out at random; it is computed all the same, as other processes wait."""
        if not self.layer_drop or not self.training:
            return after
        drawn = self.agree(torch.rand((), device=before.device))
        return torch.where(drawn < self.layer_drop, before, after)

    def _shrink(self, x: Tensor, out_scale: float) -> Tensor:
        """Dropout and scale, each only where there is one."""
        x = F.dropout(x, self.dropout, self.training) if self.dropout else x
        return _times(x, self.scale * out_scale)


def _weigh(share: Weigh | None, before: Tensor, after: Tensor) -> Tensor:
    return after if share is None else share(before, after)


def _weigh_alone(share: Weigh | None, added: Tensor) -> Tensor:
    return added if share is None else share(torch.zeros_like(added), added)


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


def _scales(part: AttentionSpec | MLPSpec | MoESpec | None) -> tuple[float, float]:
    """Factors on what goes into a part's first projections and into its last one."""
    if part is None:
        return 1.0, 1.0
    # The last projection is linear: the factor waits until after it, where the tensor is smaller.
    return part.in_scale, part.out_scale

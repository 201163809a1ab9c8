"""Hyperparameters of an encoder-decoder, and the module of its encoder or decoder stack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.models.stack import build_layers, run_layers, span_of
from bmforge.nn import BlockSpec, build_mask, build_norm
from bmforge.nn.adapter_selection import weight_of
from bmforge.nn.attention import KeyValueCache
from bmforge.nn.relative import RelativeBias

__all__ = ["Seq2SeqSpec", "Seq2SeqStack"]


@dataclass(frozen=True)
class Seq2SeqSpec:
    """Hyperparameters of an encoder-decoder.

    Args:
        block: common spec of all blocks; see `encoder_block` and `decoder_block`.
        num_encoder_layers: number of blocks of the encoder.
        num_decoder_layers: number of blocks of the decoder.
        encoder_blocks: mapping from layer index to spec, for blocks unlike `encoder_block`.
        decoder_blocks: mapping from layer index to spec, for blocks unlike `decoder_block`.
        num_buckets: number of relative position buckets, see `RelativeBias`.
        max_distance: largest bucketed distance, see `RelativeBias`.
        dropout: dropout probability after the embedding and after each stack's final norm.
        classifier_dropout: dropout probability before a classifier's layers.
        head_scale: factor on the input of the language-model head.
        num_roles: number of speaker roles (rows of `embed_segments`); 0 for none.
    """

    block: BlockSpec
    num_encoder_layers: int
    num_decoder_layers: int
    encoder_blocks: Mapping[int, BlockSpec] = field(default_factory=dict)
    decoder_blocks: Mapping[int, BlockSpec] = field(default_factory=dict)
    num_buckets: int = 32
    max_distance: int = 128
    dropout: float = 0.0
    classifier_dropout: float = 0.0
    head_scale: float = 1.0
    num_roles: int = 0

    @property
    def encoder_block(self) -> BlockSpec:
        """Spec of the encoder's blocks, with bidirectional attention."""
        assert self.block.attn is not None
        return replace(self.block, attn=replace(self.block.attn, causal=False))

    @property
    def decoder_block(self) -> BlockSpec:
        """Spec of the decoder's blocks, with causal self-attention and cross-attention."""
        block = self.encoder_block
        assert block.attn is not None
        return replace(block, attn=replace(block.attn, causal=True), cross_attn=block.attn)


class Seq2SeqStack(nn.Module):
    """Encoder or decoder: blocks that share a relative position bias, and a final norm.

    Shape:
        x: (B, T, D) -> (B, T, D)
    """

    def __init__(
        self,
        block: BlockSpec,
        num_layers: int,
        spec: Seq2SeqSpec,
        blocks: Mapping[int, BlockSpec],
    ) -> None:
        super().__init__()
        assert block.attn is not None
        self.causal, self.dropout = block.attn.causal, spec.dropout
        self.widens_half = block.guards_half
        self.layers = build_layers(block, num_layers, blocks)
        self.norm = build_norm(block.norm, block.hidden_size)
        self.rel_bias = RelativeBias(
            block.attn.num_heads, spec.num_buckets, spec.max_distance, self.causal
        )

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        keep_states: bool = False,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Return the last hidden states and, if requested, the hidden states of all layers.

        Args:
            x: token embeddings.
            attention_mask: (B, past + T), 1 for tokens, 0 for padding.
            cache: KV cache of earlier tokens.
            memory: (B, S, D), output of the encoder.
            memory_mask: (B, 1, 1, S), True for tokens of `memory` that may be attended to.
            keep_states: return all hidden states.
        """
        span = span_of(self.layers)
        if self.widens_half and x.dtype == torch.float16:
            x = x.float()
        past, shape = 0 if cache is None else cache.length, (x.shape[0], x.shape[1])
        # A prefix with positions adds columns in front; other tokens keep their distances.
        front = self._prefix_length()
        bias = self.rel_bias(shape[1], front + past + shape[1], front + past)
        mask = None
        if attention_mask is not None:
            mask = build_mask(
                shape, x.device, past=past, attention_mask=attention_mask, causal=self.causal
            )
        if mask is not None and not torch.is_grad_enabled():
            # The fused kernel accepts a bias or a mask, so they are merged once for all layers.
            shown = F.pad(mask, (front, 0), value=True)
            bias, mask = bias.masked_fill(~shown, -torch.inf), None
        x, states = run_layers(
            self.layers,
            x if span.first else self._drop(x),
            {None: mask},
            keep_states,
            bias=bias,
            cache=cache,
            memory=memory,
            memory_mask=memory_mask,
        )
        if span.last == span.total:
            x = self._drop(self.norm(x))
        return x, (*states[:-1], x) if keep_states else None

    def _prefix_length(self) -> int:
        """Return the number of positions that the layers' prefixes take; 0 if they take none."""
        attentions: Any = (layer.attn for layer in self.layers.values())
        prefixes: Any = (attn.prefix for attn in attentions if attn is not None)
        lengths = {
            prefix.length
            for prefix in prefixes
            if prefix is not None and prefix.shift_positions and weight_of(prefix)
        }
        return int(max(lengths, default=0))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x

"""ModelCenter's Encoder and Decoder: sharded, recomputed layers, and a final norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import bmforge.compat.bmtrain as bmt
from bmforge.compat.model_center.layer.blocks import BlockOptions, TransformerBlock
from bmforge.errors import ConfigError

__all__ = ["Decoder", "Encoder"]


class _Stack(nn.Module):
    """Base class of `Encoder` and `Decoder`: layers and a final norm."""

    is_decoder = False
    masked: tuple[str, ...] = ("mask_att", "mask_ffn")

    def __init__(
        self,
        num_layers: int,
        dim_model: int,
        dim_ff: int,
        num_heads: int,
        dim_head: int,
        *,
        mask_modules: list[tuple[int, ...]] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.num_layers = num_layers
        masks = mask_modules or [(0,) * len(self.masked)] * num_layers
        if len(masks) != num_layers or any(len(mask) != len(self.masked) for mask in masks):
            raise ConfigError(
                f"mask_modules={masks} must have {num_layers} entries, one "
                f"({', '.join(self.masked)}) per layer."
            )

        def make(mask: tuple[int, ...]) -> nn.Module:
            left_out = dict(zip(self.masked, map(bool, mask), strict=True))
            sizes = dim_model, dim_ff, num_heads, dim_head
            block = TransformerBlock(*sizes, self.is_decoder, **{**options, **left_out})
            return bmt.CheckpointBlock(block)

        self.layers = bmt.TransformerBlockList([make(mask) for mask in masks])
        self.output_layernorm = BlockOptions(**options).norm(dim_model)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        position_bias: Any = None,
        cross_hidden_states: Tensor | None = None,
        cross_attention_mask: Tensor | None = None,
        cross_position_bias: Any = None,
        use_cache: bool = False,
        past_key_values: Any = None,
    ) -> Any:
        """Run all layers; with `use_cache` (only without gradients) also return keys and values.

        Shape:
            hidden_states: (B, T, D) -> same; cross_hidden_states: (B, S, D);
            attention_mask: (B, T, past + T); cross_attention_mask: (B, T, S)
        """
        cross = cross_hidden_states, cross_attention_mask, cross_position_bias
        if not use_cache:
            x = self.layers(hidden_states, attention_mask, position_bias, *cross)
            return self.output_layernorm(x)
        caches = []
        with torch.no_grad():
            for number, layer in enumerate(self.layers):
                past = past_key_values[number] if past_key_values else None
                hidden_states, pair = layer(
                    hidden_states,
                    attention_mask,
                    position_bias,
                    *cross,
                    use_cache=True,
                    past_key_value=past,
                )
                caches.append(pair)
            return self.output_layernorm(hidden_states), caches


class Encoder(_Stack):
    """Encoder: self-attention layers and a final norm.

    Args:
        num_layers: number of layers.
        dim_model: hidden size.
        dim_ff: intermediate size of the MLPs.
        num_heads: number of heads N.
        dim_head: head size.
        mask_modules: a pair (attention, MLP) per layer; true means that the sublayer is skipped.
        options: fields of `BlockOptions`.
    """

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        position_bias: Any = None,
        use_cache: bool = False,
        past_key_values: Any = None,
    ) -> Any:
        """Run all layers; with `use_cache` (only without gradients) also return keys and values.

        Shape:
            hidden_states: (B, T, D) -> same; attention_mask: (B, T, past + T)
        """
        options = {"use_cache": use_cache, "past_key_values": past_key_values}
        return super().forward(hidden_states, attention_mask, position_bias, **options)


class Decoder(_Stack):
    """Decoder: layers with self- and cross-attention, and a final norm; arguments as in `Encoder`.

    `mask_modules` has a triple (self-attention, cross-attention, MLP) per layer.
    """

    is_decoder = True
    masked = ("mask_att", "mask_cross", "mask_ffn")

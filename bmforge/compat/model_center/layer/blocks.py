"""ModelCenter's blocks with norm and residual, transformer layer, Encoder and Decoder.

The layers of an Encoder or Decoder are sharded and recomputed, and followed by a norm.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bmforge.compat.bmtrain as bmt
from bmforge.compat.bmtrain.module import DistributedModule
from bmforge.compat.model_center.layer.attention import Attention, FeedForward, SparseSelfAttention
from bmforge.compat.model_center.layer.basic import LayerNorm
from bmforge.errors import ConfigError

__all__ = [
    "BlockOptions", "CrossAttentionBlock", "FFNBlock", "SelfAttentionBlock", "TransformerBlock",
    "Decoder", "Encoder",
]  # fmt: skip

Cache = tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class BlockOptions:
    """Options of the blocks, under ModelCenter's names.

    Args:
        dtype: parameter dtype (default: torch's).
        int8: must be False.
        norm_init_var: initial value of the norms' weights.
        norm_bias: layer norms instead of RMS norms.
        norm_eps: epsilon added to the variance.
        att_init_mean: mean of the initialization of attention weights; for this and the other
            initialization options see `Attention` and `FeedForward`.
        post_layer_norm: add the residual to the norm's output instead of its input.
        dropout_p: dropout of attention weights and residual branches.
        parallel_ffn: compute attention and MLP in parallel from the same input.
        mask_att: skip self-attention (a pruned layer).
        mask_cross: skip cross-attention.
        mask_ffn: skip the MLP.
        sparse_attention: sliding-window attention; see `SparseSelfAttention`.
        attention_window: window size.
    """

    dtype: torch.dtype | None = None
    int8: bool = False
    norm_init_var: float = 1.0
    norm_bias: bool = False
    norm_eps: float = 1e-5
    att_init_mean: float = 0.0
    att_init_std: float = 0.02
    att_bias: bool = False
    att_mask_value: float = float("-inf")
    ffn_init_mean: float = 0.0
    ffn_init_std: float = 0.02
    ffn_bias: bool = False
    ffn_activate_fn: str = "gated_gelu"
    pos_bias_type: str = "none"
    post_layer_norm: bool = False
    length_scale: bool = False
    attn_scale: bool = False
    dropout_p: float = 0.0
    num_heads_kv: int = -1
    parallel_ffn: bool = False
    mask_att: bool = False
    mask_cross: bool = False
    mask_ffn: bool = False
    sparse_attention: bool = False
    attention_window: int = 512

    def of(self, prefix: str, *shared: str) -> dict[str, Any]:
        """Return the options whose names begin with `prefix`, without it, and shared options."""
        own = {n.removeprefix(prefix): v for n, v in vars(self).items() if n.startswith(prefix)}
        return own | {n: getattr(self, n) for n in ("dtype", "int8", "length_scale", *shared)}

    def norm(self, width: int) -> LayerNorm:
        """Build a norm layer."""
        return LayerNorm(width, self.dtype, self.norm_bias, self.norm_eps, self.norm_init_var)


class _Part(DistributedModule):
    """Base class of blocks: norm, sublayer, dropout, and residual connection."""

    def _around(
        self, hidden: Tensor, normed: Tensor, added: Tensor, options: BlockOptions
    ) -> Tensor:
        if options.dropout_p:
            added = F.dropout(added, options.dropout_p, self.training)
        return (normed if options.post_layer_norm else hidden) + added


class SelfAttentionBlock(_Part):
    """Block of norm, self-attention and residual connection.

    Args:
        dim_model: hidden size.
        num_heads: number of heads N.
        dim_head: head size.
        options: fields of `BlockOptions`.

    Shape:
        hidden_states: (B, T, dim_model) -> same; attention_mask: (B, T, S)
    """

    def __init__(self, dim_model: int, num_heads: int, dim_head: int, **options: Any) -> None:
        super().__init__()
        self.options = o = BlockOptions(**options)
        self.layernorm_before_attention = o.norm(dim_model)
        kind = SparseSelfAttention if self.is_sparse else Attention
        more: dict[str, Any] = {"attention_window": o.attention_window} if self.is_sparse else {}
        self.self_attention = kind(
            dim_in=dim_model,
            dim_head=dim_head,
            num_heads=num_heads,
            **o.of("att_", "pos_bias_type", "attn_scale", "dropout_p", "num_heads_kv"),
            **more,
        )

    @property
    def is_sparse(self) -> bool:
        """True if attention has a sliding window."""
        return self.options.sparse_attention

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        position_bias: Any = None,
        use_cache: bool = False,
        past_key_value: Cache = None,
    ) -> Any:
        """Apply self-attention; with `use_cache`, also return the keys and values so far."""
        x = self.layernorm_before_attention(hidden_states)
        read = (x,) if self.is_sparse else (x, x)
        more = (position_bias, use_cache, past_key_value)
        result = self.self_attention(*read, attention_mask, *more)
        added, new_cache = result if use_cache else (result, None)
        out = self._around(hidden_states, x, added, self.options)
        return (out, new_cache) if use_cache else out


class CrossAttentionBlock(SelfAttentionBlock):
    """Block of norm, cross-attention and residual connection; arguments as in `SelfAttentionBlock`.

    Shape:
        key_value_states: (B, S, dim_model)
    """

    is_sparse = False

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        key_value_states: Tensor,
        attention_mask: Tensor,
        position_bias: Any = None,
    ) -> Tensor:
        """Apply cross-attention to the encoder's output."""
        x = self.layernorm_before_attention(hidden_states)
        added = self.self_attention(x, key_value_states, attention_mask, position_bias)
        return self._around(hidden_states, x, added, self.options)


class FFNBlock(_Part):
    """Block of norm, MLP and residual connection.

    Args:
        dim_model: hidden size.
        dim_ff: intermediate size.
        options: fields of `BlockOptions`.

    Shape:
        hidden_states: (B, T, dim_model) -> same
    """

    def __init__(self, dim_model: int, dim_ff: int, **options: Any) -> None:
        super().__init__()
        self.options = o = BlockOptions(**options)
        self.layernorm_before_ffn = o.norm(dim_model)
        self.ffn = FeedForward(dim_model, dim_ff, **o.of("ffn_"))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Apply norm, MLP and residual connection."""
        x = self.layernorm_before_ffn(hidden_states)
        return self._around(hidden_states, x, self.ffn(x), self.options)


class TransformerBlock(DistributedModule):
    """Transformer layer: self-attention, in decoders cross-attention, and MLP.

    Args:
        dim_model: hidden size.
        dim_ff: intermediate size.
        num_heads: number of heads N.
        dim_head: head size.
        is_decoder: True to add cross-attention.
        options: fields of `BlockOptions`.
    """

    def __init__(
        self,
        dim_model: int,
        dim_ff: int,
        num_heads: int,
        dim_head: int,
        is_decoder: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        o = BlockOptions(**options)
        settings, heads = asdict(o), (num_heads, dim_head)
        self.parallel_ffn, self.is_decoder = o.parallel_ffn, is_decoder
        self.self_att = None if o.mask_att else SelfAttentionBlock(dim_model, *heads, **settings)
        self.cross_att = None
        if is_decoder and not o.mask_cross:
            # The position bias belongs to the decoder's self-attention; cross-attention has none.
            self.cross_att = CrossAttentionBlock(dim_model, *heads, **settings)
        self.ffn = None if o.mask_ffn else FFNBlock(dim_model, dim_ff, **settings)

    def forward(
        self,
        self_hidden_states: Tensor,
        self_attention_mask: Tensor,
        self_position_bias: Any = None,
        cross_hidden_states: Tensor | None = None,
        cross_attention_mask: Tensor | None = None,
        cross_position_bias: Any = None,
        use_cache: bool = False,
        past_key_value: Cache = None,
    ) -> Any:
        """Run the layer; with `use_cache` also return the keys and values so far.

        Shape:
            self_hidden_states: (B, T, D) -> same; cross_hidden_states: (B, S, D);
            self_attention_mask: (B, T, past + T); cross_attention_mask: (B, T, S)
        """
        start = x = self_hidden_states
        new_cache: Cache = None
        if self.self_att is not None:
            result = self.self_att(
                x, self_attention_mask, self_position_bias, use_cache, past_key_value
            )
            x, new_cache = result if use_cache else (result, None)
        if self.cross_att is not None and cross_hidden_states is not None:
            x = self.cross_att(x, cross_hidden_states, cross_attention_mask, cross_position_bias)
        if self.ffn is not None:
            x = x - start + self.ffn(start) if self.parallel_ffn else self.ffn(x)
        return (x, new_cache) if use_cache else x


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
        """Run all layers; with `use_cache` (only without gradients) also return keys and values."""
        options = {"use_cache": use_cache, "past_key_values": past_key_values}
        return super().forward(hidden_states, attention_mask, position_bias, **options)


class Decoder(_Stack):
    """Decoder: layers with self- and cross-attention, and a final norm; arguments as in `Encoder`.

    `mask_modules` has a triple (self-attention, cross-attention, MLP) per layer.
    """

    is_decoder = True
    masked = ("mask_att", "mask_cross", "mask_ffn")

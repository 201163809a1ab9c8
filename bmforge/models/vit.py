"""Vision Transformer (Dosovitskiy et al., "An Image is Worth 16x16 Words", 2020).

An image is split into patches, one token each, preceded by a class token that the classifier uses.
Verified against transformers' ViTForImageClassification and ViTModel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.errors import ConfigError, ShapeError
from bmforge.models.base import Model
from bmforge.models.config import ModelConfig
from bmforge.models.heads import Head, check_labels, finish_classes
from bmforge.models.output import ModelOutput
from bmforge.models.stack import StackSpec, build_layers, run_layers, span_of
from bmforge.models.traits import Traits
from bmforge.models.weights import WeightRule, linear_rules
from bmforge.nn import AttentionSpec, BlockSpec, MLPSpec, NormSpec, build_norm
from bmforge.nn.mlp import get_activation

__all__ = ["PatchEmbedding", "ViT", "ViTConfig"]

_BASE = {"hidden_size": 768, "num_layers": 12, "num_heads": 12}
_LARGE = {"hidden_size": 1024, "num_layers": 24, "num_heads": 16}
_POOLER = ("pooler.weight", "pooler.bias")
_SQUARES = ("image_size", "patch_size")


@dataclass(kw_only=True)
class ViTConfig(ModelConfig):
    """Config of ViT; other fields are those of `ModelConfig`.

    There is no vocabulary (`vocab_size` is 0). `max_seq_len` is the number of patches plus one, for
    the class token.

    Args:
        image_size: height and width of the images in pixels.
        patch_size: height and width of a patch in pixels.
        num_channels: number of channels of the images.
        activation: activation of the MLP, such as gelu, gelu_new, relu or silu.
        qkv_bias: use biases on q, k and v.
        dropout: dropout probability of embeddings and of each sublayer's output.
        attn_dropout: dropout probability of attention weights.
        pooler_size: width of `pooler_output`; 0 means D.
        pooler_activation: activation of the pooler.
        add_pooling_layer: True if the model without a head has a pooler.
    """

    family: ClassVar[str] = "vit"
    heads: ClassVar[dict[str, Head]] = {
        "image_classification": Head(
            "ViTForImageClassification",
            {"classifier.weight": "classifier.weight", "classifier.bias": "classifier.bias"},
        ),
        "none": Head("ViTModel", prefix="", optional=_POOLER),
    }
    hf_names: ClassVar[dict[str, str]] = {
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "norm_eps": "layer_norm_eps",
        "activation": "hidden_act",
        "dropout": "hidden_dropout_prob",
        "attn_dropout": "attention_probs_dropout_prob",
        "init_std": "initializer_range",
        "image_size": "image_size",
        "patch_size": "patch_size",
        "num_channels": "num_channels",
        "qkv_bias": "qkv_bias",
        "pooler_size": "pooler_output_size",
        "pooler_activation": "pooler_act",
    }
    # encoder_stride belongs to the decoder for masked images.
    hf_ignored: ClassVar[frozenset[str]] = frozenset({"encoder_stride", "tie_word_embeddings"})
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "vit-base-patch16-224": {**_BASE, "num_labels": 1000},
        "vit-base_patch16_224": {**_BASE, "num_labels": 1000},
        "vit-large-patch16-224": {**_LARGE, "num_labels": 1000},
        "vit-base-patch16-224-in21k": {**_BASE, "head": "none"},
        "vit-large-patch16-224-in21k": {**_LARGE, "head": "none"},
    }
    hub_ids: ClassVar[dict[str, str]] = {
        "vit-base-patch16-224": "google/vit-base-patch16-224",
        "vit-base_patch16_224": "google/vit-base-patch16-224",
        "vit-large-patch16-224": "google/vit-large-patch16-224",
        "vit-base-patch16-224-in21k": "google/vit-base-patch16-224-in21k",
        "vit-large-patch16-224-in21k": "google/vit-large-patch16-224-in21k",
    }

    vocab_size: int = field(default=0, init=False)
    max_seq_len: int = field(default=0, init=False)
    hidden_size: int = 768
    intermediate_size: int = 0
    num_layers: int = 12
    num_heads: int = 12
    num_kv_heads: int = 0
    head_dim: int = 0
    norm_eps: float = 1e-12
    image_size: int = 224
    patch_size: int = 16
    num_channels: int = 3
    activation: str = "gelu"
    qkv_bias: bool = True
    dropout: float = 0.0
    attn_dropout: float = 0.0
    pooler_size: int = 0
    pooler_activation: str = "tanh"
    add_pooling_layer: bool = True

    def __post_init__(self) -> None:
        """Set the default MLP width (4 D); derive the token count and the base class's fields."""
        self.intermediate_size = self.intermediate_size or 4 * self.hidden_size
        self.pooler_size = self.pooler_size or self.hidden_size
        super().__post_init__()
        self.max_seq_len = self.grid_size**2 + 1

    @property
    def grid_size(self) -> int:
        """Number of patches along each side of an image."""
        return self.image_size // max(self.patch_size, 1)

    def problems(self) -> Iterator[str]:
        """Yield a message for each inconsistency among the fields."""
        yield from super().problems()
        if self.patch_size < 1 or self.num_channels < 1 or self.image_size < self.patch_size:
            yield (
                f"image_size={self.image_size}, patch_size={self.patch_size} and "
                f"num_channels={self.num_channels} must be positive, and patch_size must not "
                "exceed image_size"
            )

    @classmethod
    def _read_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        for name in _SQUARES:
            value = raw.get(name)
            if isinstance(value, list | tuple):
                if len(value) != 2 or value[0] != value[1]:
                    raise ConfigError(
                        f"ViTConfig: {name}={value!r} must be one number or two equal numbers."
                    )
                raw[name] = value[0]
        pooling = raw.pop("add_pooling_layer", None)
        return ({} if pooling is None else {"add_pooling_layer": pooling}), raw

    def _write_special(self) -> dict[str, Any]:
        pairs = {name: [getattr(self, name)] * 2 for name in _SQUARES}
        out: dict[str, Any] = {n: pair for n, pair in pairs.items() if self.raw.get(n) == pair}
        if not self.add_pooling_layer or "add_pooling_layer" in self.raw:
            out["add_pooling_layer"] = self.add_pooling_layer
        return out

    def flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs per token, including the patch embedding; see `ModelConfig`."""
        patch = self.num_channels * self.patch_size**2 * self.hidden_size
        return super().flops_per_token(seq_len) + 6 * patch

    def kv_bytes_per_token(self, bytes_per_element: int = 2) -> int:
        """Return 0: an image model has no KV cache."""
        return 0


class PatchEmbedding(nn.Module):
    """Patch embedding: a convolution whose stride equals its kernel size.

    It is computed as one matrix product, which is faster than the convolution on a CPU.

    Args:
        num_channels: number C of channels.
        hidden_size: width D of the hidden states.
        patch_size: height and width P of a patch.

    Shape:
        pixels: (B, C, H, W) -> (B, D, H / P, W / P), not contiguous; pixels at the lower and right
            edges that do not fill a patch are ignored
    """

    def __init__(self, num_channels: int, hidden_size: int, patch_size: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.weight = nn.Parameter(torch.empty(hidden_size, num_channels, patch_size, patch_size))
        self.bias = nn.Parameter(torch.empty(hidden_size))

    def forward(self, pixels: Tensor) -> Tensor:
        """Embed every patch."""
        size = self.patch_size
        rows, columns = pixels.shape[2] // size, pixels.shape[3] // size
        pixels = pixels[:, :, : rows * size, : columns * size]
        patches = pixels.unflatten(3, (columns, size)).unflatten(2, (rows, size))
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        embedded = F.linear(patches, self.weight.flatten(1), self.bias)
        return embedded.transpose(1, 2).unflatten(2, (rows, columns))

    def extra_repr(self) -> str:
        """Return the sizes as text."""
        width, channels = self.weight.shape[:2]
        return f"{channels}, {width}, patch_size={self.patch_size}"


class ViT(Model):
    """ViT with a classifier on the class token, or with a pooler instead of a head."""

    config_class = ViTConfig
    family_traits = Traits("bidirectional", "images", "learned", has_images=True)
    hf_prefix = "vit."
    hf_unused = ("pooler.dense.*", "vit.pooler.dense.*")

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.embed_class = nn.Parameter(torch.empty(1, 1, width))
        self.embed_positions = nn.Parameter(torch.empty(1, config.max_seq_len, width))
        self.embed_patches = PatchEmbedding(config.num_channels, width, config.patch_size)
        attn = AttentionSpec(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            qkv_bias=config.qkv_bias,
            dropout=config.attn_dropout,
            causal=False,
        )
        mlp = MLPSpec(config.intermediate_size, config.activation)
        norm = NormSpec("layer", config.norm_eps)
        block = BlockSpec(width, attn, mlp, norm=norm, residual_dropout=config.dropout)
        self.spec = StackSpec(block)
        self.layers = build_layers(block, config.num_layers)
        self.norm = build_norm(norm, width)
        if config.head == "image_classification":
            self.classifier = nn.Linear(width, config.num_labels)
        elif config.add_pooling_layer:
            self.pooler = nn.Linear(width, config.pooler_size)

    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        num_items_in_batch: float | Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        output_hidden_states: bool = False,
        attention_mask: Tensor | None = None,
    ) -> ModelOutput:
        """Classify images, or return their features.

        Args:
            pixel_values: images from the model's image processor.
            labels: labels as in `classification_loss`; if passed, the loss is also returned.
            num_items_in_batch: divisor of the summed loss; if None, the loss is the mean.
            interpolate_pos_encoding: interpolate position embeddings for images of a different
                size.
            output_hidden_states: return the outputs of embedding and layers, before `norm`.
            attention_mask: 1 for tokens (class token, then patches) that may be attended to.

        Shape:
            pixel_values: (B, C, H, W); labels: (B,), or (B, L) for multi-label classification;
            attention_mask: (B, 1 + patches)

        Raises:
            ShapeError: the images have a different size or number of channels, or the mask has a
                different length.
        """
        self._check_images(pixel_values, interpolate_pos_encoding)
        span = span_of(self.layers)
        x = (
            self.stage_inputs[0]
            if span.first
            else self._embed(pixel_values, interpolate_pos_encoding)
        )
        mask = None
        if attention_mask is not None:
            if attention_mask.shape != x.shape[:2]:
                raise ShapeError(
                    f"attention_mask has the shape {tuple(attention_mask.shape)} (expected: "
                    f"{tuple(x.shape[:2])}, for the class token and the patches)."
                )
            mask = attention_mask.bool()[:, None, None]
        x, states = run_layers(self.layers, x, {None: mask}, output_hidden_states)
        if span.last < span.total:
            return ModelOutput(stage_outputs=(x,))
        x = self.norm(x)
        out = ModelOutput(
            last_hidden_state=x, hidden_states=tuple(states) if output_hidden_states else None
        )
        if self.config.head == "image_classification":
            if labels is not None:
                check_labels(labels, x.shape[0])
            logits = self.classifier(x[:, 0])
            return finish_classes(out, logits, labels, self.config.problem_type, num_items_in_batch)
        if not self.config.add_pooling_layer:
            return out
        act = get_activation(self.config.pooler_activation)
        return out._replace(pooler_output=act(self.pooler(x[:, 0])))

    def _check_images(self, images: Tensor, any_size: bool) -> None:
        config = self.config
        size, patch, channels = config.image_size, config.patch_size, config.num_channels
        shape = tuple(images.shape)
        if images.dim() != 4 or shape[1] != channels:
            raise ShapeError(
                f"pixel_values has the shape {shape} (expected: (batch, {channels} "
                f"channels, {size}, {size})). Use the image processor of the model."
            )
        if not any_size and shape[2:] != (size, size):
            raise ShapeError(
                f"the images have {shape[2]} x {shape[3]} pixels, but the model needs {size} x "
                f"{size}. Resize them, or pass interpolate_pos_encoding=True."
            )
        if min(shape[2:]) < patch:
            raise ShapeError(
                f"the images have {shape[2]} x {shape[3]} pixels, fewer than one patch of {patch} "
                f"x {patch}. Use larger images."
            )

    def _embed(self, images: Tensor, any_size: bool) -> Tensor:
        """Return the first block's input (B, 1 + patches, D) for images."""
        patches = self.embed_patches(images.to(self.embed_patches.weight.dtype))
        patches = patches.flatten(2).transpose(1, 2)
        first = self.embed_class.expand(patches.shape[0], -1, -1)
        positions = self._stretch_positions(*images.shape[2:]) if any_size else self.embed_positions
        x = torch.cat((first, patches), 1) + positions
        dropout = self.config.dropout
        return F.dropout(x, dropout, self.training) if dropout else x

    def _stretch_positions(self, height: int, width: int) -> Tensor:
        """Return the position embeddings, bicubically interpolated to images of a different
        size.
        """
        config = self.config
        if height == width and height // config.patch_size == config.grid_size:
            return self.embed_positions
        grid = self.embed_positions[:, 1:].unflatten(1, (config.grid_size, config.grid_size))
        size = (height // config.patch_size, width // config.patch_size)
        grid = F.interpolate(grid.permute(0, 3, 1, 2), size, mode="bicubic", align_corners=False)
        return torch.cat((self.embed_positions[:, :1], grid.flatten(2).transpose(1, 2)), 1)

    def weight_rules(self) -> list[WeightRule]:
        """Map parameter names to transformers' names."""
        block, published = "layers.{i}.", "vit.encoder.layer.{i}."
        attention = f"{published}attention.attention."
        return [
            WeightRule("embed_class", "vit.embeddings.cls_token"),
            WeightRule("embed_positions", "vit.embeddings.position_embeddings"),
            *linear_rules(
                {
                    "embed_patches": "vit.embeddings.patch_embeddings.projection",
                    "norm": "vit.layernorm",
                    "pooler": "vit.pooler.dense",
                    f"{block}attn_norm": f"{published}layernorm_before",
                    f"{block}mlp_norm": f"{published}layernorm_after",
                    f"{block}attn.q_proj": f"{attention}query",
                    f"{block}attn.k_proj": f"{attention}key",
                    f"{block}attn.v_proj": f"{attention}value",
                    f"{block}attn.o_proj": f"{published}attention.output.dense",
                    f"{block}mlp.up_proj": f"{published}intermediate.dense",
                    f"{block}mlp.down_proj": f"{published}output.dense",
                }
            ),
        ]

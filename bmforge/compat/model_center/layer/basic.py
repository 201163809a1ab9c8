"""Linear, Embedding, LayerNorm and Conv2d with ModelCenter's arguments.

`bmt.init_parameters` initializes the parameters; the default `dtype` is torch's (ModelCenter's was
fp16).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bmforge.compat.bmtrain.module import DistributedModule
from bmforge.compat.bmtrain.parameter import DistributedParameter, ParameterInitializer
from bmforge.errors import ConfigError

__all__ = ["Conv2d", "Embedding", "LayerNorm", "Linear", "PatchEmbedding", "normal_parameter"]


def normal_parameter(
    shape: tuple[int, ...], dtype: torch.dtype | None, mean: float, std: float
) -> Any:
    """Create a parameter with normal initialization."""
    method = ParameterInitializer(torch.nn.init.normal_, mean=mean, std=std)
    return DistributedParameter(torch.empty(shape, dtype=dtype), init_method=method)


def _constant(size: int, dtype: torch.dtype | None, value: float) -> Any:
    method = ParameterInitializer(torch.nn.init.constant_, value)
    return DistributedParameter(torch.full((size,), value, dtype=dtype), init_method=method)


def _refuse_int8(int8: bool) -> None:
    if int8:
        raise ConfigError("int8=True has no effect, as it had none in ModelCenter. Leave int8 out.")


class Linear(DistributedModule):
    """Linear layer ``y = W x + b``.

    Args:
        dim_in: features of x.
        dim_out: features of y.
        length_scale: divide the output by sqrt(`dim_in`).
        length_scale_before: divide the input instead.
        dtype: parameter dtype (default: torch's).
        int8: must be False.
        init_mean: mean of the initialization of W.
        init_std: standard deviation of the initialization of W.
        bias: add a bias, initialized to 0.

    Shape:
        x: (..., dim_in) -> (..., dim_out)
    """

    def __init__(
        self,
        dim_in: int,
        dim_out: int,
        length_scale: bool = False,
        length_scale_before: bool = False,
        dtype: torch.dtype | None = None,
        int8: bool = False,
        init_mean: float = 0.0,
        init_std: float = 1.0,
        bias: bool = False,
    ) -> None:
        super().__init__()
        _refuse_int8(int8)
        self.dim_in, self.dim_out = dim_in, dim_out
        self.length_scale, self.length_scale_before = length_scale, length_scale_before
        self.weight = normal_parameter((dim_out, dim_in), dtype, init_mean, init_std)
        self.bias = _constant(dim_out, dtype, 0.0) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Apply the linear layer."""
        scale = 1 / math.sqrt(self.dim_in) if self.length_scale else 1.0
        if self.length_scale and self.length_scale_before:
            x, scale = x * scale, 1.0
        if scale == 1.0:
            return F.linear(x, self.weight, self.bias)
        y, bias = F.linear(x, self.weight) * scale, self.bias
        return y if bias is None else y + bias


class Embedding(DistributedModule):
    """Embedding table.

    Args:
        vocab_size: number of rows.
        embedding_size: embedding size.
        length_scale: divide embeddings by sqrt(embedding_size).
        dtype, int8, init_mean, init_std: as in `Linear`.
        padding_idx: row without gradient, initialized to 0.

    Shape:
        ids: (...) -> (..., embedding_size)
    """

    def __init__(
        self,
        vocab_size: int,
        embedding_size: int,
        length_scale: bool = False,
        dtype: torch.dtype | None = None,
        int8: bool = False,
        init_mean: float = 0.0,
        init_std: float = 1.0,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__()
        _refuse_int8(int8)
        self.dim_model, self.length_scale = embedding_size, length_scale
        self.padding_idx = padding_idx

        def draw_(weight: Tensor) -> None:
            torch.nn.init.normal_(weight, init_mean, init_std)
            if padding_idx is not None:
                weight[padding_idx] = 0

        empty = torch.empty(vocab_size, embedding_size, dtype=dtype)
        self.weight: Any = DistributedParameter(empty, init_method=draw_)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up embeddings."""
        rows = F.embedding(ids, self.weight, self.padding_idx)
        return rows / math.sqrt(self.dim_model) if self.length_scale else rows

    def projection(self, x: Tensor) -> Tensor:
        """Return the logits, with the embedding matrix as the output head.

        Shape:
            x: (..., embedding_size) -> (..., vocab_size)
        """
        x = x / math.sqrt(self.dim_model) if self.length_scale else x
        return F.linear(x, self.weight)


class LayerNorm(DistributedModule):
    """Layer norm, or with ``bias=False`` RMS norm.

    Args:
        dim_norm: number of features.
        dtype: parameter dtype (default: torch's).
        bias: True for layer norm with a bias, False for RMS norm.
        eps: epsilon added to the variance.
        init_var: initial value of the weight.

    Shape:
        x: (..., dim_norm) -> same
    """

    def __init__(
        self,
        dim_norm: int,
        dtype: torch.dtype | None = None,
        bias: bool = True,
        eps: float = 1e-5,
        init_var: float = 1.0,
    ) -> None:
        super().__init__()
        self.dim_norm, self.eps = dim_norm, eps
        self.weight = _constant(dim_norm, dtype, init_var)
        self.bias = _constant(dim_norm, dtype, 0.0) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dim; RMS norm computes in fp32 or wider."""
        bias = self.bias
        if bias is not None:
            return F.layer_norm(x, (self.dim_norm,), self.weight, bias, self.eps)
        wide = x if x.dtype == torch.float64 else x.float()
        return F.rms_norm(wide, (self.dim_norm,), eps=self.eps).to(x.dtype) * self.weight


class Conv2d(DistributedModule):
    """2-D convolution with torch's arguments.

    Args:
        in_channels: input channels.
        out_channels: output channels.
        kernel_size: side of the kernel.
        stride: stride of the kernel.
        padding: zero padding on each side.
        bias: add a bias.
        dtype: parameter dtype (default: torch's).

    Shape:
        x: (B, in_channels, H, W) -> (B, out_channels, H', W')
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        bias: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.stride, self.padding = stride, padding
        like = torch.nn.Conv2d(in_channels, out_channels, kernel_size, dtype=dtype, device="meta")
        spread = ParameterInitializer(torch.nn.init.kaiming_uniform_, a=math.sqrt(5))
        self.weight: Any = DistributedParameter(
            torch.empty(like.weight.shape, dtype=dtype), init_method=spread
        )
        bound = 1 / math.sqrt(in_channels * kernel_size**2)
        evenly = ParameterInitializer(torch.nn.init.uniform_, -bound, bound)
        empty = torch.empty(out_channels, dtype=dtype)
        self.bias: Any = DistributedParameter(empty, init_method=evenly) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Apply the convolution."""
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding)


class PatchEmbedding(DistributedModule):
    """Embeds image patches, adds a class token and position embeddings.

    Args:
        img_size: image side in pixels.
        patch_size: patch side in pixels.
        in_chans: number of channels.
        embed_dim: embedding size.
        flatten: must be True.
        dtype: parameter dtype (default: torch's).

    Shape:
        x: (B, in_chans, img_size, img_size) -> (B, 1 + patches, embed_dim)
    """

    def __init__(
        self,
        img_size: int = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        flatten: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not flatten:
            raise ConfigError(
                "flatten=False is not supported (supported: True). Use Conv2d for images."
            )
        count = (img_size // patch_size) ** 2
        self.proj = Conv2d(in_chans, embed_dim, patch_size, patch_size, dtype=dtype)
        self.cls_token = normal_parameter((1, 1, embed_dim), dtype, 0.0, 0.02)
        self.pos_embed = normal_parameter((1, count + 1, embed_dim), dtype, 0.0, 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Embed the patches of images."""
        patches = self.proj(x).flatten(2).transpose(1, 2)
        first = self.cls_token.expand(x.shape[0], -1, -1)
        tokens: Tensor = torch.cat((first, patches), 1) + self.pos_embed
        return tokens

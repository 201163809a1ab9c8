"""Linear, Embedding, LayerNorm and Conv2d with their old arguments.

Parameters are drawn by `bmt.init_parameters`, as they were; without a `dtype` they have torch's
default one (the old layers took fp16).
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

__all__ = ["Conv2d", "Embedding", "LayerNorm", "Linear", "PatchEmbedding"]


def _normal(shape: tuple[int, ...], dtype: torch.dtype | None, mean: float, std: float) -> Any:
    """Return a parameter that is drawn from a normal distribution."""
    method = ParameterInitializer(torch.nn.init.normal_, mean=mean, std=std)
    return DistributedParameter(torch.empty(shape, dtype=dtype), init_method=method)


def _constant(size: int, dtype: torch.dtype | None, value: float) -> Any:
    method = ParameterInitializer(torch.nn.init.constant_, value)
    return DistributedParameter(torch.full((size,), value, dtype=dtype), init_method=method)


def _refuse_int8(int8: bool) -> None:
    if int8:
        raise ConfigError("int8=True has no effect here, and had none before: leave it out.")


class Linear(DistributedModule):
    """``y = W x + b``.

    Args:
        dim_in: features of x.
        dim_out: features of y.
        length_scale: divide by the root of `dim_in`, behind W, or
        length_scale_before: before it.
        dtype: of the parameters; None takes torch's default.
        int8: must be False.
        init_mean: of W.
        init_std: of W.
        bias: whether there is a b; it starts at 0.

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
        self.weight = _normal((dim_out, dim_in), dtype, init_mean, init_std)
        self.bias = _constant(dim_out, dtype, 0.0) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Apply the matrix."""
        scale = 1 / math.sqrt(self.dim_in) if self.length_scale else 1.0
        if self.length_scale and self.length_scale_before:
            x, scale = x * scale, 1.0
        if scale == 1.0:
            return F.linear(x, self.weight, self.bias)
        y, bias = F.linear(x, self.weight) * scale, self.bias
        return y if bias is None else y + bias


class Embedding(DistributedModule):
    """A table of vectors.

    Args:
        vocab_size: rows.
        embedding_size: width of a row.
        length_scale: divide by the root of the width.
        dtype: of the parameters; None takes torch's default.
        int8: must be False.
        init_mean: of the rows.
        init_std: of the rows.
        padding_idx: a row that gets no gradient and starts at 0.

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
        """Look rows up."""
        rows = F.embedding(ids, self.weight, self.padding_idx)
        return rows / math.sqrt(self.dim_model) if self.length_scale else rows

    def projection(self, x: Tensor) -> Tensor:
        """Return the scores of all rows, a tied head.

        Shape:
            x: (..., embedding_size) -> (..., vocab_size)
        """
        x = x / math.sqrt(self.dim_model) if self.length_scale else x
        return F.linear(x, self.weight)


class LayerNorm(DistributedModule):
    """A layer norm, or with ``bias=False`` a root-mean-square norm.

    Args:
        dim_norm: features.
        dtype: of the parameters; None takes torch's default.
        bias: layer norm with a bias; else root-mean-square norm without.
        eps: added to the variance.
        init_var: where the weight starts.

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
        """Normalise the last dim; a root-mean-square in fp32 or wider."""
        bias = self.bias
        if bias is not None:
            return F.layer_norm(x, (self.dim_norm,), self.weight, bias, self.eps)
        wide = x if x.dtype == torch.float64 else x.float()
        return F.rms_norm(wide, (self.dim_norm,), eps=self.eps).to(x.dtype) * self.weight


class Conv2d(DistributedModule):
    """A convolution with torch's arguments.

    Args:
        in_channels: of the input.
        out_channels: of the output.
        kernel_size: of the square kernel.
        stride: step of the kernel.
        padding: zeros around.
        bias: whether there is a bias.
        dtype: of the parameters; None takes torch's default.

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
        """Apply the kernel."""
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding)


class PatchEmbedding(DistributedModule):
    """Images to a class token and their patches, with positions.

    Args:
        img_size: pixels along a side.
        patch_size: of a patch.
        in_chans: channels.
        embed_dim: width of a token.
        flatten: must be True.
        dtype: of the parameters; None takes torch's default.

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
            raise ConfigError("flatten=False: patches are tokens here. For an image use Conv2d.")
        count = (img_size // patch_size) ** 2
        self.proj = Conv2d(in_chans, embed_dim, patch_size, patch_size, dtype=dtype)
        self.cls_token = _normal((1, 1, embed_dim), dtype, 0.0, 0.02)
        self.pos_embed = _normal((1, count + 1, embed_dim), dtype, 0.0, 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Cut into patches and embed them."""
        patches = self.proj(x).flatten(2).transpose(1, 2)
        first = self.cls_token.expand(x.shape[0], -1, -1)
        tokens: Tensor = torch.cat((first, patches), 1) + self.pos_embed
        return tokens

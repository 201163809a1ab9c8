"""Operators for accelerators: RMS norm, addition with RMS norm, and attention to cached pages.

Every operator is one Triton kernel or, if Triton is missing, a sequence of torch operations. The
operators have no gradient and are not used under `torch.compile`, which fuses norms itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from bmforge.device import wide_dtype
from bmforge.nn.triton_kernels import load_triton

__all__ = ["attend_pages", "plain_rms_norm", "takes_device_kernels"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_WIDEST_ROW = 1 << 15


def takes_device_kernels(x: Tensor, *others: Tensor) -> bool:
    """Return True if the operators of this module support these tensors.

    The tensors must be on an accelerator, plain, contiguous, of one dtype and without gradients.
    """
    if x.is_cpu or x.is_meta or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return False
    return x.dtype in _DTYPES and all(
        t.dtype == x.dtype and t.is_contiguous() and not is_traceable_wrapper_subclass(t)
        for t in (x, *others)
    )


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``weight * x / sqrt(mean(x^2) + eps)``, normalized in fp32 or wider."""
    wide = x.to(wide_dtype(x.dtype))
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(weight.dtype)


def attend_pages(
    query: Tensor,
    pages: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor] | None,
    tables: Tensor,
    ends: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """Compute attention of one token per sequence over the sequence's cached pages.

    Args:
        query: queries, one token per row.
        pages: keys and values of all pages.
        scales: scales of the keys and values if these are int8.
        tables: page indices of each row.
        ends: number of tokens that each row attends to, including its own token.
        scale: factor on the scores.
        window: sliding window in tokens; None means no limit.

    Shape:
        query: (rows, N, H); pages: (pages, K, 16, H) each; tables: (rows, width) int32;
        ends: (rows,) int32; returns (rows, N, H)
    """
    pair = (None, None) if scales is None else scales
    return torch.ops.bmforge.attend_pages(query, *pages, *pair, tables, ends, scale, window or 0)


_LIBRARY = torch.library.Library("bmforge", "FRAGMENT")
_LIBRARY.define("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor")
_LIBRARY.define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "attend_pages(Tensor query, Tensor keys, Tensor values, Tensor? key_scales, "
    "Tensor? value_scales, Tensor tables, Tensor ends, float scale, int window) -> Tensor"
)


def _rms_norm_op(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    kernels = load_triton(x.device) if x.shape[-1] <= _WIDEST_ROW and x.numel() else None
    if kernels is None:
        return plain_rms_norm(x, weight, eps)
    return kernels.add_rms_norm(x, None, weight, eps)[1]


def _add_rms_norm_op(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    kernels = load_triton(x.device) if x.shape[-1] <= _WIDEST_ROW and x.numel() else None
    if kernels is None:
        total = residual + x
        return total, plain_rms_norm(total, weight, eps)
    return kernels.add_rms_norm(x, residual, weight, eps)


def _attend_pages_op(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    tables: Tensor,
    ends: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    kernels = load_triton(query.device)
    # Triton multiplies without tensor cores on Turing, where torch's attention is faster.
    if kernels is not None and kernels.has_tensor_cores and keys.dtype in (query.dtype, torch.int8):
        has_scales = key_scales is not None and value_scales is not None
        scales = (key_scales, value_scales) if has_scales else None
        return kernels.attend(
            query.contiguous(), (keys, values), scales, tables, ends, scale, window or None
        )
    return _attend_gathered(
        query, (keys, key_scales), (values, value_scales), tables, ends, scale, window
    )


def _attend_gathered(
    query: Tensor,
    keys: tuple[Tensor, Tensor | None],
    values: tuple[Tensor, Tensor | None],
    tables: Tensor,
    ends: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    """Gather the pages of all rows, padded to the longest row, and attend with a mask."""
    index = tables.long()
    position = torch.arange(16 * tables.shape[1], device=query.device)
    shown = position < ends[:, None]
    if window:
        shown = shown & (position >= ends[:, None] - window)
    gathered = []
    for stored, scales in (keys, values):
        tokens = stored[index]  # (rows, width, K, 16, H)
        if scales is not None:
            tokens = tokens.float() * scales[index][..., None]
        tokens = tokens.transpose(1, 2).flatten(2, 3).to(query.dtype)
        # Slots that were never written may be NaN, and 0 * NaN is NaN.
        tokens = tokens.where(shown[:, None, :, None], 0)
        gathered.append(tokens.repeat_interleave(query.shape[1] // tokens.shape[1], 1))
    out = F.scaled_dot_product_attention(
        query[:, :, None],
        gathered[0],
        gathered[1],
        attn_mask=shown[:, None, None],
        scale=scale,
    )
    return out[:, :, 0]


_LIBRARY.impl("rms_norm", _rms_norm_op, "CompositeExplicitAutograd")
_LIBRARY.impl("add_rms_norm", _add_rms_norm_op, "CompositeExplicitAutograd")
_LIBRARY.impl("attend_pages", _attend_pages_op, "CompositeExplicitAutograd")


@torch.library.register_fake("bmforge::rms_norm")
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x, dtype=weight.dtype)


@torch.library.register_fake("bmforge::add_rms_norm")
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=weight.dtype)


@torch.library.register_fake("bmforge::attend_pages")
def _(query: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(query)

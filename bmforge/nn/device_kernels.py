"""Operators for accelerators: norms, rotary positions, gates, and the pages of a KV cache.

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

from bmforge.nn.plain_rows import plain_rms_norm, plain_rotate
from bmforge.nn.triton_kernels import load_triton

__all__ = ["attend_pages", "rotate_and_store_", "store_in_pages_", "can_use_device_kernels"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_WIDEST_ROW = 1 << 15


def can_use_device_kernels(x: Tensor, *others: Tensor) -> bool:
    """Return True if the operators of this module support these tensors.

    They must be contiguous accelerator tensors of one dtype, and not of a tensor subclass.
    Autograd, `torch.compile` and functorch transforms must be off.
    """
    if x.is_cpu or x.is_meta or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return False
    return x.dtype in _DTYPES and all(
        t.dtype == x.dtype and t.is_contiguous() and not is_traceable_wrapper_subclass(t)
        for t in (x, *others)
    )


def store_in_pages_(
    key: Tensor,
    value: Tensor,
    pages: tuple[Tensor, Tensor],
    numbers: Tensor,
    offsets: Tensor,
) -> None:
    """Write keys and values of tokens to a float KV cache.

    Args:
        key: keys of the tokens.
        value: values of the tokens.
        pages: keys and values of all pages.
        numbers: index of each token's page.
        offsets: position of each token in its page.

    Shape:
        key, value: (T, K, H); pages: (pages, K, 16, H) each; numbers, offsets: (T,) int64
    """
    kind = pages[0].dtype
    key, value = key.to(kind), value.to(kind)
    if can_use_device_kernels(key, value, *pages):
        torch.ops.bmforge.store_in_pages(key, value, *pages, numbers, offsets)
        return
    for stored, new in zip(pages, (key, value), strict=True):
        stored[numbers, :, offsets] = new


def rotate_and_store_(
    new: tuple[Tensor, Tensor, Tensor],
    rope: tuple[Tensor, Tensor, bool],
    pages: tuple[Tensor, Tensor],
    numbers: Tensor,
    offsets: Tensor,
) -> Tensor | None:
    """Rotate queries and keys (RoPE), and write keys and values to a float KV cache.

    Args:
        new: queries, keys and values of the tokens.
        rope: cos, sin and whether pairs are interleaved; see `position.apply_rope`.
        pages, numbers, offsets: see `store_in_pages_`.

    Returns:
        Rotated queries, or None if the kernel does not support the tensors; nothing is then
        written.

    Shape:
        new: (T, N, H), (T, K, H), (T, K, H); cos, sin: (1, 1, T, R); returns (T, N, H)
    """
    cos, sin, is_interleaved = rope
    if len(cos) != 1 or not can_use_device_kernels(*new, cos, sin, *pages):
        return None
    tables = cos[0, 0], sin[0, 0]
    return torch.ops.bmforge.rotate_and_store(
        *new, *tables, *pages, numbers, offsets, is_interleaved
    )


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
        query: queries, one row per sequence (one token each).
        pages: keys and values of all pages.
        scales: scales of the keys and values if these are int8.
        tables: page indices of each sequence.
        ends: number of tokens that each query attends to, including the query's own token.
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
_LIBRARY.define("rotate(Tensor x, Tensor cos, Tensor sin, bool is_interleaved) -> Tensor")
_LIBRARY.define("multiply_by_silu(Tensor gate, Tensor up) -> Tensor")
_LIBRARY.define(
    "store_in_pages(Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, Tensor numbers, "
    "Tensor offsets) -> ()"
)
_LIBRARY.define(
    "rotate_and_store(Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin, "
    "Tensor(a!) keys, Tensor(b!) values, Tensor numbers, Tensor offsets, bool is_interleaved)"
    " -> Tensor"
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


def _rotate_op(x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool) -> Tensor:
    kernels = load_triton(x.device)
    if kernels is None:
        return plain_rotate(x, cos[:, None], sin[:, None], is_interleaved)
    return kernels.rotate(x, cos, sin, is_interleaved)


def _multiply_by_silu_op(gate: Tensor, up: Tensor) -> Tensor:
    kernels = load_triton(gate.device)
    return F.silu(gate) * up if kernels is None else kernels.multiply_by_silu(gate, up)


def _store_in_pages_op(
    key: Tensor, value: Tensor, keys: Tensor, values: Tensor, numbers: Tensor, offsets: Tensor
) -> None:
    kernels = load_triton(key.device)
    if kernels is None:
        keys[numbers, :, offsets] = key
        values[numbers, :, offsets] = value
    else:
        kernels.store((key, value), (keys, values), (numbers, offsets))


def _rotate_and_store_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    numbers: Tensor,
    offsets: Tensor,
    is_interleaved: bool,
) -> Tensor:
    kernels = load_triton(query.device)
    if kernels is not None:
        rope, slots = (cos, sin, is_interleaved), (numbers, offsets)
        return kernels.rotate_and_store((query, key, value), rope, (keys, values), slots)
    _store_in_pages_op(
        _rotate_op(key, cos, sin, is_interleaved), value, keys, values, numbers, offsets
    )
    return _rotate_op(query, cos, sin, is_interleaved)


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
_LIBRARY.impl("rotate", _rotate_op, "CompositeExplicitAutograd")
_LIBRARY.impl("multiply_by_silu", _multiply_by_silu_op, "CompositeExplicitAutograd")
_LIBRARY.impl("store_in_pages", _store_in_pages_op, "CompositeExplicitAutograd")
_LIBRARY.impl("rotate_and_store", _rotate_and_store_op, "CompositeExplicitAutograd")
_LIBRARY.impl("attend_pages", _attend_pages_op, "CompositeExplicitAutograd")


@torch.library.register_fake("bmforge::rms_norm")
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x, dtype=weight.dtype)


@torch.library.register_fake("bmforge::add_rms_norm")
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=weight.dtype)


@torch.library.register_fake("bmforge::rotate")
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


@torch.library.register_fake("bmforge::multiply_by_silu")
def _(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate)


@torch.library.register_fake("bmforge::store_in_pages")
def _(*_: Any) -> None:
    pass


@torch.library.register_fake("bmforge::rotate_and_store")
def _(query: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(query)


@torch.library.register_fake("bmforge::attend_pages")
def _(query: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(query)

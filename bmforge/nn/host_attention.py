"""bmforge's CPU attention kernel for whole sequences, forward and backward.

Torch's CPU kernel multiplies small tiles with BLAS, whose call overhead is as large as the product;
with dropout it stores all weights. This kernel accumulates in registers; see
`kernels/attention.cpp`.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bmforge.native import load_kernels_of

__all__ = ["host_attention", "can_use_host_attention"]

_FOLDER = Path(__file__).with_name("kernels")
_SOURCES = ("floats.hpp", "attention.cpp")
# Results need not be bit-identical on all processors, so fused multiply-add is allowed.
_FLAGS = "-march=native -ffp-contract=fast"
_DTYPES = (torch.float32, torch.bfloat16)
_VECTOR = 16
# With fewer queries torch's kernel is as fast.
_FEWEST_QUERIES = 16


class _Shape(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "heads", "shared_heads")),
        *((name, ctypes.c_int64) for name in ("queries", "keys", "width", "seed")),
        *((name, ctypes.c_float) for name in ("scale", "dropout")),
        *((name, ctypes.c_int32) for name in ("causal", "threads", "is_narrow")),
    ]


class _Array(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("row", "head", "token")),
    ]


class _Mask(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("row", ctypes.c_int64), ("query", ctypes.c_int64)]


def can_use_host_attention(
    query: Tensor, mask: Tensor | None = None, pair: tuple[Tensor, ...] = ()
) -> bool:
    """Return True if `host_attention` supports these inputs and the kernel could be compiled.

    Args:
        query: queries.
        mask: attention mask.
        pair: keys and values. Under autocast, rotated keys are fp32 and values bf16; torch's
            attention converts both.
    """
    if any(tensor.dtype != query.dtype for tensor in pair):
        return False
    is_plain = type(query) is Tensor or torch.compiler.is_compiling()
    is_supported = (
        is_plain and query.is_cpu and query.dtype in _DTYPES and query.shape[-1] % _VECTOR == 0
    )
    is_shared = mask is None or mask.shape[1] == 1
    return is_supported and is_shared and query.shape[2] >= _FEWEST_QUERIES and _is_loaded()


def host_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return ``softmax(scale * q k^T) v`` with fp32 arithmetic, for fp32 and bf16 tensors.

    Args:
        query: queries, fp32 or bf16, on the CPU.
        key: keys, with N heads or fewer (grouped-query attention).
        value: values, with as many heads as the keys.
        mask: boolean, True where a query attends; a query that attends to no key yields zeros.
        causal: the query at position t attends to the keys up to t.
        scale: factor on the scores; None means 1/sqrt(H).
        dropout: dropout probability of the attention weights; the kernel is seeded by one
            number per call from torch's generator.

    Shape:
        query: (B, N, T, H); key, value: (B, K, S, H), H a multiple of 16;
        mask: (B or 1, 1, T or 1, S); returns (B, N, T, H), stored in the order (B, T, N, H)
    """
    assert query.dtype == key.dtype == value.dtype  # the kernel reads all with one type
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if mask is not None:
        mask = mask.expand(query.shape[0], 1, query.shape[2], key.shape[2])
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
    seed = torch.randint(1 << 62, ()) if dropout else None
    out: Tensor = _attend(query, key, value, mask, seed, causal, scale, dropout)[0]
    return out


@torch.library.custom_op("bmforge::host_attention", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    causal: bool,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Compute the attention output and the log-sum-exp of each query's scores, (B, N, T)."""
    query, key, value = _with_rows(query, key, value)
    shape = _describe(query, key, seed, causal, scale, dropout)
    out, sums = _empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)
    kernel, scratch = _load(), _make_scratch(shape, backward=False)
    arrays = _arrays(query, key, value, out)
    kernel.attention_forward(shape, *arrays, _at(sums), _describe_mask(mask), _at(scratch))
    return out, sums


@_attend.register_fake
def _(query: Tensor, *arguments: object) -> tuple[Tensor, Tensor]:
    return _empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.library.custom_op("bmforge::host_attention_backward", mutates_args=())
def _attend_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    causal: bool,
    scale: float,
    dropout: float,
    out: Tensor,
    sums: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of query, key and value."""
    query, key, value, out, grad = _with_rows(query, key, value, out, grad)
    shape = _describe(query, key, seed, causal, scale, dropout)
    grads = _empty_like(query), _empty_like(key), _empty_like(value)
    kernel, scratch = _load(), _make_scratch(shape, backward=True)
    arrays = _arrays(query, key, value, out, grad)
    outputs = _at(sums), _describe_mask(mask), *_arrays(*grads), _at(scratch)
    kernel.attention_backward(shape, *arrays, *outputs)
    return grads


@_attend_backward.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, *arguments: object
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_like(query), _empty_like(key), _empty_like(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.settings = inputs[:5], inputs[5:]
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, out, sums = ctx.saved_tensors
    grads = _attend_backward(*tensors, *ctx.settings, out, sums, grad)
    return *grads, None, None, None, None, None


_attend.register_autograd(_differentiate, setup_context=_keep)


def _with_rows(*tensors: Tensor) -> list[Tensor]:
    """Return a tensor whose last dim is contiguous, as the kernel requires."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _empty_like(x: Tensor) -> Tensor:
    """Allocate (B, N, T, H) in the order (B, T, N, H), which `o_proj` reads without a copy."""
    return x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)


def _describe(
    query: Tensor, key: Tensor, seed: Tensor | None, causal: bool, scale: float, dropout: float
) -> _Shape:
    batch, heads, queries, width = query.shape
    return _Shape(
        *(batch, heads, key.shape[1], queries, key.shape[2], width),
        0 if seed is None else int(seed),
        *(scale, dropout, causal, torch.get_num_threads(), query.dtype == torch.bfloat16),
    )


def _make_scratch(shape: _Shape, backward: bool) -> Tensor:
    return torch.empty(shape.threads * _load().attention_scratch(shape, int(backward)))


def _arrays(*tensors: Tensor) -> list[_Array]:
    return [_Array(x.data_ptr(), *x.stride()[:3]) for x in tensors]


def _describe_mask(mask: Tensor | None) -> _Mask:
    if mask is None:
        return _Mask(None, 0, 0)
    return _Mask(mask.data_ptr(), mask.stride(0), mask.stride(2))


def _at(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def _is_loaded() -> bool:
    return _kernel() is not None


# Set as `torch.compiler.assume_constant_result` does, which would import torch._dynamo (seconds).
_is_loaded._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _load() -> ctypes.CDLL:
    library = _kernel()
    assert library is not None  # callers check `can_use_host_attention` first
    return library


@cache
def _kernel() -> ctypes.CDLL | None:
    """Return the kernel compiled for this processor; None if there is no compiler."""
    return _compile(_FLAGS)


def _compile(flags: str) -> ctypes.CDLL | None:
    library = load_kernels_of("attention", _FOLDER, _SOURCES, flags)
    if library is None:
        return None
    shape, array, mask = (ctypes.POINTER(kind) for kind in (_Shape, _Array, _Mask))
    pointer = ctypes.c_void_p
    four: list[Any] = [array] * 4  # query, key, value, output
    library.attention_scratch.argtypes = [shape, ctypes.c_int]
    library.attention_scratch.restype = ctypes.c_int64
    library.attention_forward.argtypes = [shape, *four, pointer, mask, pointer]
    library.attention_forward.restype = None
    library.attention_backward.argtypes = [shape, *four, array, pointer, mask, *four[:3], pointer]
    library.attention_backward.restype = None
    return library

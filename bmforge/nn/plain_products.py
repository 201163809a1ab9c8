"""Reference implementation of the matrix products in torch; kernels must match it bit for bit.

It is used if there is no C++ compiler, and every compiled kernel is compared with it once.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bmforge.nn.packing import (
    PackedMatrix,
    QuantSpec,
    pack_matrix,
    quantize_groups,
    unpack_matrix,
    unpack_values,
)
from bmforge.nn.product_kernels import PLAIN_KINDS, Kernels

__all__ = [
    "matches_torch",
    "multiply_plain",
    "multiply_quantized_plain",
    "multiply_rows_plain",
    "quantize_activations",
]

_LARGEST = 127
# Sums of at most this many products are exact in fp32, in any order.
_EXACT_COLUMNS = 1024
# Columns of a test weight whose rows, with the activations, exceed the L1 cache.
_LONG_ROW = 20001


def quantize_activations(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantize activations to int8 by groups of columns; return integers and scales.

    The scale of a group with a non-finite value is NaN.

    Shape:
        x: (T, columns) fp32; returns (T, columns) int8 and (T, groups) fp32
    """
    groups = x.unflatten(-1, (-1, group))
    largest = groups.abs().amax(-1)
    scales = largest / _LARGEST
    is_zero = scales < torch.finfo(torch.float32).tiny
    is_finite = largest.isfinite()
    # `number / tensor` would round twice, since torch multiplies the number by the reciprocal.
    inverse = torch.full_like(largest, _LARGEST) / largest
    inverse = inverse.where(~is_zero & is_finite, 0.0)
    finite = groups.where(is_finite[..., None], 0.0)
    values = (finite * inverse[..., None]).round().to(torch.int8)
    scales = scales.where(is_finite, torch.nan).where(~is_zero, 0.0)
    return values.flatten(-2), scales


def multiply_plain(
    x: Tensor, matrix: PackedMatrix, rows: int, spec: QuantSpec, bias: Tensor | None
) -> Tensor:
    """Multiply activations by a packed matrix in torch, without native kernels.

    With int8 activations the result is bit-identical to that of the kernels; with float activations
    it is equal up to rounding.

    Shape:
        x: (T, columns) fp32 -> (T, rows)
    """
    if spec.activations == "float":
        return F.linear(x, unpack_matrix(matrix, rows, spec), bias)
    quantized = quantize_activations(x, spec.group_of(x.shape[1]))
    return multiply_quantized_plain(*quantized, matrix, rows, spec, bias)


def multiply_quantized_plain(
    values: Tensor,
    x_scales: Tensor,
    matrix: PackedMatrix,
    rows: int,
    spec: QuantSpec,
    bias: Tensor | None,
) -> Tensor:
    """Multiply the result of `quantize_activations` by a packed matrix; see `multiply_plain`."""
    group = spec.group_of(values.shape[1])
    wide = torch.float32 if group <= _EXACT_COLUMNS else torch.float64
    exact = values.to(wide)
    weights = unpack_values(matrix.packed, spec)[:rows].to(wide)
    scales, minima = (
        None if scale is None else scale.float().transpose(1, 2).flatten(0, 1)[:rows]
        for scale in (matrix.scales, matrix.minima)
    )
    assert scales is not None
    out = x_scales.new_zeros(values.shape[0], rows)
    for g in range(scales.shape[1]):
        part = slice(g * group, (g + 1) * group)
        sums = (exact[:, part] @ weights[:, part].t()).to(torch.float32)
        out += sums * (x_scales[:, g, None] * scales[:, g])
        if minima is not None:
            of_tokens = exact[:, part].sum(1).to(torch.float32) * x_scales[:, g]
            out += of_tokens[:, None] * minima[:, g]
    return out if bias is None else out + bias


def multiply_rows_plain(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply activations by an unpacked weight.

    The result is bit-identical to that of the kernels.

    Order of summation: each step adds 64 columns to four sums of sixteen lanes by fused
    multiply-add; then the four sums are added in pairs, then the lanes.

    Shape:
        x: (T, columns) fp32; weight: (rows, columns); returns (T, rows) fp32
    """
    more = -x.shape[1] % 64
    wide, weights = F.pad(x, (0, more)), F.pad(weight.float(), (0, more))
    total = x.new_zeros(x.shape[0], weight.shape[0], 64)
    for c in range(0, wide.shape[1], 64):
        total = _multiply_and_add(wide[:, None, c : c + 64], weights[:, c : c + 64], total)
    a, b, c, d = total.split(16, -1)
    lanes = (a + b) + (c + d)
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def _multiply_and_add(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Return ``x * y + z`` of fp32 tensors, rounded once.

    The product is exact in fp64. The sum is rounded to odd in fp64, so that the second rounding, to
    fp32, gives the result of a single rounding (Boldo and Melquiond, "Emulation of FMA", 2008).
    """
    product, addend = x.double() * y.double(), z.double()
    total = product + addend
    rounded_addend = total - product
    error = (product - (total - rounded_addend)) + (addend - rounded_addend)
    is_even = (total.view(torch.int64) & 1) == 0
    odd = torch.nextafter(total, torch.where(error > 0, torch.inf, -torch.inf).to(total))
    return torch.where((error != 0) & is_even, odd, total).float()


def matches_torch(kernels: Kernels) -> bool:
    """Return True if the kernels match torch bit for bit on a small matrix of every scheme."""
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float32)
    dense, bias = draw(37, 256), draw(37)
    x = draw(9, 256) * torch.logspace(-6, 6, 9, dtype=torch.float32)[:, None]
    for bits, group, symmetric, wide in (
        (8, 32, True, False),
        (8, 0, True, True),
        (4, 32, True, False),
        (4, 128, False, True),
    ):
        spec = QuantSpec(bits, group, symmetric, scale_dtype="float32" if wide else "float16")
        if not _packed_alike(kernels, dense, x, bias, spec):
            return False
    many, few = (x, dense), (draw(5, _LONG_ROW), draw(7, _LONG_ROW))
    return all(
        _rows_alike(kernels, *shape, dtype) for shape in (many, few) for dtype in PLAIN_KINDS
    )


def _rows_alike(kernels: Kernels, x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Return True if the kernels for unpacked weights match the reference for 1 to T tokens."""
    narrow = weight.to(dtype)
    want = multiply_rows_plain(x, narrow)
    return all(
        torch.equal(kernels.multiply_rows(x[:tokens], narrow), want[:tokens])
        for tokens in range(1, len(x) + 1)
    )


def _packed_alike(
    kernels: Kernels, dense: Tensor, x: Tensor, bias: Tensor, spec: QuantSpec
) -> bool:
    """Return True if all kernels for packed weights match the reference."""
    rows = dense.shape[0]
    matrix = pack_matrix(quantize_groups(dense, spec), spec)
    plain = unpack_matrix(matrix, rows, spec)
    every = torch.arange(rows)
    pairs = [(kernels.unpack(matrix, rows, spec), plain)]
    pairs.append((kernels.pick(matrix, every, rows, spec), plain))
    for some in (x[:1], x):
        want = multiply_plain(some, matrix, rows, spec, bias)
        pairs.append((kernels.multiply(some, matrix, rows, spec, bias), want))
    if spec.symmetric:
        packed, scales = kernels.pack(dense, spec)
        pairs += [(packed, matrix.packed), (scales.to(spec.scale_type), matrix.scales)]
    return all(got is not None and torch.equal(got, want) for got, want in pairs)

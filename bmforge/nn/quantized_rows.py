"""Operators on quantized activations, each one Triton kernel on an accelerator.

They have no gradient. Without Triton, torch computes the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bmforge.nn.packing import PackedMatrix
from bmforge.nn.plain_products import multiply_quantized_plain, quantize_activations
from bmforge.nn.plain_rows import plain_rms_norm
from bmforge.nn.products import decode_spec
from bmforge.nn.triton_kernels import load_triton

__all__ = ["QuantizedRows"]


@dataclass(frozen=True)
class QuantizedRows:
    """Activations quantized by groups of columns, for `multiply_jointly`.

    Args:
        values: (T, columns) int8.
        scales: scales of the groups, (T, groups) fp32.
        sums: sums of the values of each group, (T, groups) int32.
        dtype: dtype of the activations.
        shape: sizes of the dims before the last one; their product is T.
    """

    values: Tensor
    scales: Tensor
    sums: Tensor
    dtype: torch.dtype
    shape: torch.Size


_LIBRARY = torch.library.Library("bmforge", "FRAGMENT")
_LIBRARY.define("quantize_rows(Tensor x, Tensor? up, int group) -> (Tensor, Tensor, Tensor)")
_LIBRARY.define(
    "quantize_norm(Tensor x, Tensor? residual, Tensor weight, float eps, int group)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "multiply_jointly(Tensor values, Tensor value_scales, Tensor sums, Tensor[] packed, "
    "Tensor[] scales, Tensor[] minima, Tensor[] biases, int[] rows, int[] spec, "
    "ScalarType dtype) -> Tensor[]"
)


def _quantize_plain(x: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize activations; return integers, scales, and the sums of each group's integers."""
    values, scales = quantize_activations(x.float(), group)
    return values, scales, values.unflatten(1, (-1, group)).sum(-1, dtype=torch.int32)


def _quantize_rows_op(x: Tensor, up: Tensor | None, group: int) -> tuple[Tensor, Tensor, Tensor]:
    kernels = load_triton(x.device)
    if kernels is not None:
        return kernels.quantize(x, group, up)
    return _quantize_plain(x if up is None else F.silu(x) * up, group)


def _quantize_norm_op(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, group: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kernels = load_triton(x.device)
    if kernels is not None:
        total, *parts = kernels.quantize_norm(x, residual, weight, eps, group)
    else:
        total = x if residual is None else residual + x
        parts = [*_quantize_plain(plain_rms_norm(total, weight, eps), group)]
    # An operator must not return its input.
    return total.new_empty(0) if residual is None else total, parts[0], parts[1], parts[2]


def _multiply_jointly_op(
    values: Tensor,
    value_scales: Tensor,
    sums: Tensor,
    packed: list[Tensor],
    scales: list[Tensor],
    minima: list[Tensor],
    biases: list[Tensor],
    rows: list[int],
    spec: list[int],
    dtype: torch.dtype,
) -> list[Tensor]:
    """Multiply quantized activations by several matrices."""
    lows, shifts = (each or [None] * len(rows) for each in (minima, biases))
    matrices = [PackedMatrix(*parts) for parts in zip(packed, scales, lows, strict=True)]
    scheme, kernels = decode_spec(spec, matrices[0]), load_triton(values.device)
    factors = list(zip(matrices, rows, shifts, strict=True))
    if kernels is not None:
        quantized = values, value_scales, sums
        return kernels.multiply_quantized(quantized, factors, scheme, dtype)
    outs = []
    for matrix, height, bias in factors:
        wide = None if bias is None else bias.float()
        out = multiply_quantized_plain(values, value_scales, matrix, height, scheme, wide)
        outs.append(out.to(dtype))
    return outs


_LIBRARY.impl("quantize_rows", _quantize_rows_op, "CompositeExplicitAutograd")
_LIBRARY.impl("quantize_norm", _quantize_norm_op, "CompositeExplicitAutograd")
_LIBRARY.impl("multiply_jointly", _multiply_jointly_op, "CompositeExplicitAutograd")


@torch.library.register_fake("bmforge::quantize_rows")
def _(x: Tensor, up: Any, group: int) -> Any:
    groups = x.shape[0], x.shape[1] // group
    scales, sums = (x.new_empty(groups, dtype=kind) for kind in (torch.float32, torch.int32))
    return torch.empty_like(x, dtype=torch.int8), scales, sums


@torch.library.register_fake("bmforge::quantize_norm")
def _(x: Tensor, residual: Any, weight: Tensor, eps: float, group: int) -> Any:
    groups = x.shape[0], x.shape[1] // group
    scales, sums = (x.new_empty(groups, dtype=kind) for kind in (torch.float32, torch.int32))
    total = x.new_empty(0) if residual is None else torch.empty_like(x)
    return total, torch.empty_like(x, dtype=torch.int8), scales, sums


@torch.library.register_fake("bmforge::multiply_jointly")
def _(values: Tensor, *others: Any) -> Any:
    *_, rows, _, dtype = others
    return [values.new_empty(len(values), n, dtype=dtype) for n in rows]

"""Rounding matrices and activations as the runtime's storage does, staying floats.

Where the runtime's kernels run they do it, with the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bmforge.nn.packing import QuantSpec, quantize_groups, unpack_values
from bmforge.nn.plain_products import quantize_activations as quantize_plain
from bmforge.nn.products import Kernels, dequantize, load_kernels, pack_weights

__all__ = [
    "quantize_activations",
    "quantize_rows",
    "round_activations",
    "round_matrix",
    "round_weight",
]


def _kernels_for(tensor: Tensor) -> Kernels | None:
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()
    return load_kernels() if plain and tensor.is_cpu else None


def round_matrix(matrix: Tensor, spec: QuantSpec) -> Tensor:
    """Return what a matrix is after it was packed, bit for bit, in its own dtype.

    Shape:
        matrix: (rows, columns); returns the same
    """
    rows, columns = matrix.shape
    if spec.symmetric and _kernels_for(matrix) is not None:
        return dequantize(pack_weights(matrix, spec), rows, spec).to(matrix.dtype)
    found = quantize_groups(matrix, spec)
    values = found.values.view(rows, -1, spec.group_of(columns)).float()
    values *= found.scales.float()[..., None]
    if found.minima is not None:
        values += found.minima.float()[..., None]
    return values.view(rows, columns).to(matrix.dtype)


def quantize_rows(matrix: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Return the integers of a matrix whose rows have one scale each, and these scales.

    Shape:
        matrix: (rows, columns); returns (rows, columns) int8 and (rows,) fp32
    """
    if _kernels_for(matrix) is None:
        found = quantize_groups(matrix, spec)
        return found.values, found.scales[:, 0].float()
    packed, rows = pack_weights(matrix, spec), matrix.shape[0]
    scales = packed.scales.transpose(1, 2).flatten(0, 1)[:rows, 0]
    return unpack_values(packed.packed, spec)[:rows], scales.float()


def quantize_activations(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return integers and scales of activations by groups of columns, in the runtime's bits.

    Shape:
        x: (T, columns); returns (T, columns) int8 and (T, groups) fp32
    """
    wide = x.float()
    kernels = _kernels_for(wide)
    if kernels is None:
        return quantize_plain(wide, group)
    values, scales, _ = kernels.quantize(wide.contiguous(), group)
    return values, scales


class _RoundWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, spec: QuantSpec, is_turned: bool) -> Tensor:
        weight = weight.detach()
        if weight.dim() == 3:
            return round_matrix(weight.flatten(0, 1), spec).view(weight.shape)
        return round_matrix(weight.t(), spec).t() if is_turned else round_matrix(weight, spec)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, None


class _RoundActivations(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: int) -> Tensor:
        values, scales = quantize_activations(x.detach().reshape(-1, x.shape[-1]), group)
        rounded = values.unflatten(-1, (-1, group)) * scales[..., None]
        return rounded.view(x.shape).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


def round_weight(weight: Tensor, spec: QuantSpec, is_turned: bool = False) -> Tensor:
    """Return a weight rounded; its gradient goes through as if it were not.

    Args:
        weight: (rows, columns), or a stack of such.
        spec: how.
        is_turned: it lies (columns, rows), as in transformers' Conv1D.

    Source: Bengio et al., "Estimating or propagating gradients through stochastic neurons" (2013).
    """
    return _RoundWeight.apply(weight, spec, is_turned)


def round_activations(x: Tensor, group: int) -> Tensor:
    """Return activations rounded by groups of columns, token by token; gradients go through.

    Shape:
        x: (..., columns); returns the same
    """
    return _RoundActivations.apply(x, group)

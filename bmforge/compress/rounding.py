"""Rounds matrices and activations to the values that inference storage formats represent.

The inference kernels are used if they are available, so the results are bit-identical.
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
    """Quantize and dequantize a matrix in its dtype, bit-identical to packed weights.

    Shape:
        matrix: (rows, columns); returns the same
    """
    rows, columns = matrix.shape
    if spec.symmetric and _kernels_for(matrix) is not None:
        return dequantize(pack_weights(matrix, spec), rows, spec).to(matrix.dtype)
    quantized = quantize_groups(matrix, spec)
    values = quantized.values.view(rows, -1, spec.group_of(columns)).float()
    values *= quantized.scales.float()[..., None]
    if quantized.minima is not None:
        values += quantized.minima.float()[..., None]
    return values.view(rows, columns).to(matrix.dtype)


def quantize_rows(matrix: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Quantize a matrix with one scale per row; return the integers and the scales.

    Shape:
        matrix: (rows, columns); returns (rows, columns) int8 and (rows,) fp32
    """
    if _kernels_for(matrix) is None:
        quantized = quantize_groups(matrix, spec)
        return quantized.values, quantized.scales[:, 0].float()
    packed, rows = pack_weights(matrix, spec), matrix.shape[0]
    scales = packed.scales.transpose(1, 2).flatten(0, 1)[:rows, 0]
    return unpack_values(packed.packed, spec)[:rows], scales.float()


def quantize_activations(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantize activations by groups of columns, bit-identical to inference.

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
    """Fake-quantize a weight with a straight-through estimator for its gradient.

    Args:
        weight: one matrix, (rows, columns), or a stack of matrices.
        spec: quantization scheme.
        is_turned: True if the weight is stored as (columns, rows), as in transformers' Conv1D.

    Source: Bengio et al., "Estimating or propagating gradients through stochastic neurons" (2013).
    """
    return _RoundWeight.apply(weight, spec, is_turned)


def round_activations(x: Tensor, group: int) -> Tensor:
    """Fake-quantize activations per token and column group, with straight-through gradients.

    Shape:
        x: (..., columns); returns the same
    """
    return _RoundActivations.apply(x, group)

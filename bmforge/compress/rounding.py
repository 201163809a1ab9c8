"""Rounding matrices and activations as the runtime's storage does, staying floats."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bmforge.nn.packing import QuantSpec, quantize_groups
from bmforge.nn.products import quantize_activations

__all__ = ["round_activations", "round_matrix", "round_weight"]


def round_matrix(matrix: Tensor, spec: QuantSpec) -> Tensor:
    """Return what a matrix is after it was packed, bit for bit, in its own dtype.

    Shape:
        matrix: (rows, columns); returns the same
    """
    found = quantize_groups(matrix, spec)
    rows, columns = matrix.shape
    values = found.values.view(rows, -1, spec.group_of(columns)).float()
    values *= found.scales.float()[..., None]
    if found.minima is not None:
        values += found.minima.float()[..., None]
    return values.view(rows, columns).to(matrix.dtype)


class _RoundWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, spec: QuantSpec, is_turned: bool) -> Tensor:
        if weight.dim() == 3:
            return round_matrix(weight.flatten(0, 1), spec).view(weight.shape)
        return round_matrix(weight.t(), spec).t() if is_turned else round_matrix(weight, spec)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, None


class _RoundActivations(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: int) -> Tensor:
        values, scales = quantize_activations(x.reshape(-1, x.shape[-1]).float(), group)
        rounded = values.unflatten(-1, (-1, group)).float() * scales[..., None]
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

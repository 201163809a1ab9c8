"""Tolerances by dtype, and comparisons that report which tensors differ."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["TOLERANCES", "assert_close", "assert_equal_trees"]

# Dtype -> (rtol, atol). With float64's, a wrong layout fails, but another order of summation does
# not.
TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-9, 1e-12),
    torch.float32: (1e-5, 1e-6),
    torch.bfloat16: (1.6e-2, 1e-2),
    torch.float16: (1e-3, 1e-3),
}


def assert_close(
    actual: Mapping[str, Tensor] | Tensor,
    expected: Mapping[str, Tensor] | Tensor,
    *,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Compare tensors, or two mappings of tensors with equal keys, at the dtype's tolerance.

    Args:
        actual: computed tensors.
        expected: reference tensors.
        rtol: relative tolerance (default: that of the dtype).
        atol: absolute tolerance (default: that of the dtype).

    Raises:
        AssertionError: some tensors differ; the message lists them with their largest differences.
    """
    if isinstance(actual, Tensor) and isinstance(expected, Tensor):
        actual, expected = {"tensor": actual}, {"tensor": expected}
    assert isinstance(actual, Mapping)
    assert isinstance(expected, Mapping)
    assert set(actual) == set(expected), f"keys differ: {set(actual) ^ set(expected)}"
    wrong = []
    for name, want in expected.items():
        got = actual[name]
        table_rtol, table_atol = TOLERANCES.get(want.dtype, (0.0, 0.0))
        r, a = table_rtol if rtol is None else rtol, table_atol if atol is None else atol
        if got.shape != want.shape or not torch.allclose(got, want, rtol=r, atol=a):
            difference = (got - want).abs().max().item() if got.shape == want.shape else "shape"
            wrong.append(
                f"{name} of shape {tuple(got.shape)}: the largest difference is {difference} "
                f"(rtol={r}, atol={a})"
            )
    assert not wrong, "\n".join(wrong)


def assert_equal_trees(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Compare two mappings of tensors bit for bit."""
    assert set(actual) == set(expected), f"keys differ: {set(actual) ^ set(expected)}"
    wrong = [name for name in expected if not torch.equal(actual[name], expected[name])]
    assert not wrong, f"tensors are not bit-identical: {wrong}"

"""Base class of stacked experts with packed weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bmforge.errors import ConfigError
from bmforge.nn.grouped import grouped_linear
from bmforge.nn.packed_store import PackedStore
from bmforge.nn.packing import QuantSpec, dequantize_stack
from bmforge.nn.part import TensorNote
from bmforge.nn.products import encode_spec

__all__ = ["StackStore"]


class StackStore(PackedStore):
    """Base class of experts with packed weights; every stack of matrices is packed separately."""

    def _make_stacks(
        self, sizes: dict[str, tuple[int, int, int]], spec: QuantSpec, like: Tensor
    ) -> None:
        """Create the uninitialized parameters of stacks with the given sizes (E, out, in)."""
        if spec.outlier_ratio:
            raise ConfigError(
                f"outlier_ratio={spec.outlier_ratio} is not supported for experts. Exclude the "
                "experts with `where`, or set outlier_ratio=0."
            )
        self._sizes = sizes
        self._keep(spec, like.dtype, like.device)
        for key, shape in sizes.items():
            self._add_matrix(f"{key}_", shape, like.device)

    def stack_sizes(self) -> dict[str, tuple[int, int, int]]:
        """Return a dict from the name of each stacked matrix to its sizes (E, out, in)."""
        return self._sizes

    def fill_(self, key: str, stack: Tensor) -> None:
        """Quantize the stacked matrices `stack`, (E, out, in), into the parameters of `key`."""
        for number, matrix in enumerate(stack):
            self._take(f"{key}_", matrix, number)

    def multiply(self, key: str, x: Tensor, ends: Tensor) -> Tensor:
        """Multiply each expert's rows by its packed matrix `key`."""
        if x.dtype == torch.float64 and self.spec.activations == "float":
            return grouped_linear(x, self.dense(key, x.dtype), ends)
        wants = torch.is_grad_enabled() and x.requires_grad
        run: Any = torch.ops.bmforge.multiply_stacked
        if wants:
            from bmforge.nn.packed_autograd import GroupedProduct  # for training only

            run = GroupedProduct.apply
        tensors, rows = self._tensors(f"{key}_"), self._sizes[key][1]
        return run(x, *tensors, rows, encode_spec(self.spec), ends)

    def plain(self, key: str) -> Tensor:
        """Return a dequantized stack in fp32, (E, out, in)."""
        return self.dense(key, torch.float32)

    def dense(self, key: str, dtype: torch.dtype) -> Tensor:
        """Return a dequantized stack in `dtype`, (E, out, in)."""
        tensors, rows = self._tensors(f"{key}_"), self._sizes[key][1]
        return dequantize_stack(*tensors, rows, encode_spec(self.spec)).to(dtype)

    def tensor_notes(self) -> Mapping[str, TensorNote]:
        """Return how the tensors are initialized: dense stacks are sampled, then packed."""
        notes: dict[str, TensorNote] = {}
        for key, shape in self._sizes.items():
            notes |= self._notes(f"{key}_", key, shape)
        return notes

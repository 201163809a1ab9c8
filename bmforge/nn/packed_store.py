"""Base classes of modules with packed quantized weights: tensors, initialization, products.

Packed tensors are ordinary parameters without gradients. They contain no floats (scales are stored
as bytes), so that dtype casts leave them unchanged, and layouts and streaming support them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.nn.packing import (
    PANEL_ROWS,
    PackedMatrix,
    QuantSpec,
    packed_shapes,
    unpack_matrix,
)
from bmforge.nn.part import Derived, TensorNote
from bmforge.nn.products import (
    FEW_TOKENS,
    are_plain_cpu_tensors,
    encode_spec,
    load_kernels,
    multiply_packed,
    pack_weights,
    product_dtype,
)
from bmforge.nn.tracing import is_tracing

__all__ = ["MatrixStore", "PackedRows", "PackedStore"]

# Elements quantized at a time, which bounds the memory needed besides the matrix.
_ELEMENTS_AT_ONCE = 1 << 19
# Elements dequantized at a time for a loss: 64 MiB; a head of 32,000 x 4,096 has 500 MiB.
_NUMBERS_AT_ONCE = 1 << 24


class PackedStore(nn.Module):
    """Base class of modules with packed quantized weights.

    Attributes:
        spec: quantization scheme.
        like: empty tensor with the dtype and device of the model.
        unsharded_reason: reason why tensor parallelism cannot shard the module, for error messages.
    """

    spec: QuantSpec
    like: Tensor
    unsharded_reason = (
        "packed weights are stored in panels of rows, which tensor parallelism cannot "
        'shard; store these layers as int8 rows instead (change "int8"), or use tp=1'
    )

    def _keep(self, spec: QuantSpec, dtype: torch.dtype, device: Any) -> None:
        self.spec = spec
        self.register_buffer("like", torch.empty(0, dtype=dtype, device=device), persistent=False)

    def _add_matrix(self, prefix: str, shape: tuple[int, ...], device: Any) -> None:
        """Create the uninitialized parameters of one matrix or of a stack of matrices."""
        *stack, rows, columns = shape
        if problem := self.spec.problem(columns):
            raise ConfigError(f"{problem}.")
        for key, sizes in packed_shapes(rows, columns, self.spec).items():
            each = 1 if key == "packed" else self.spec.scale_type.itemsize
            shape = (*stack, *sizes[:-1], sizes[-1] * each)
            empty = torch.zeros(shape, dtype=torch.uint8, device=device)
            self.register_parameter(prefix + key, nn.Parameter(empty, requires_grad=False))
        if self.spec.symmetric:
            self.register_parameter(f"{prefix}minima", None)

    @abstractmethod
    def plain(self, key: str) -> Tensor:
        """Return the dequantized value, in fp32, of a parameter of the unquantized module."""

    def _tensors(self, prefix: str = "") -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the packed integers, and the scales and minima as floats."""
        scales: Any = getattr(self, f"{prefix}scales")
        minima: Any = getattr(self, f"{prefix}minima")
        floats = self.spec.scale_type
        minima = None if minima is None else minima.view(floats)
        return getattr(self, f"{prefix}packed"), scales.view(floats), minima

    def _notes(
        self, prefix: str, base: str, shape: tuple[int, ...], outliers: int = 0
    ) -> dict[str, TensorNote]:
        keys = packed_shapes(shape[-2], shape[-1], self.spec)
        each = PANEL_ROWS if len(shape) == 2 else 1
        return {
            prefix + key: TensorNote(
                Derived(base, shape, partial(_packed_rows, key, self.spec, outliers), each),
                trains=False,
            )
            for key in keys
        }

    @torch.no_grad()
    def _take(self, prefix: str, matrix: Tensor, number: int | None = None) -> None:
        """Quantize a matrix (rows, columns) into the parameters, some rows at a time."""
        step = _rows_at_once(matrix)
        for first in range(0, matrix.shape[0], step):
            part = matrix[first : first + step]
            self.put_(prefix, pack_weights(part, self.spec), first // PANEL_ROWS, number)

    def put_(
        self, prefix: str, source: PackedMatrix, panel: int = 0, number: int | None = None
    ) -> None:
        """Copy panels (blocks of 16 rows) that are already packed with the same scheme.

        Args:
            prefix: prefix of the parameters' names.
            source: packed panels to copy; tensors that `panels` returned are not copied.
            panel: index of the first panel to overwrite.
            number: index of the matrix in a stack; None if the parameter is not a stack.
        """
        for key, values in source._asdict().items():
            if values is None:
                continue
            target = self.panels(prefix + key, panel, values.shape[0], number)
            if target.data_ptr() != values.data_ptr():
                target.copy_(values.view(torch.uint8))

    def panels(self, name: str, first: int, count: int, number: int | None = None) -> Tensor:
        """Return `count` panels (blocks of 16 rows) of a parameter, from panel `first` on."""
        target: Tensor = getattr(self, name).data
        target = target if number is None else target[number]
        return target[first : first + count]


def _rows_at_once(matrix: Tensor) -> int:
    """Return the number of rows to quantize at a time, a multiple of 16 (see `nn.packing`)."""
    return max(1, _ELEMENTS_AT_ONCE // matrix.shape[1] // PANEL_ROWS) * PANEL_ROWS


def _packed_rows(key: str, spec: QuantSpec, outliers: int, rows: Tensor) -> Tensor:
    """Pack freshly initialized rows of one matrix, or of each matrix of a stack.

    The first `outliers` columns become zero, because they are stored in 16 bits.
    """
    if rows.dim() == 3:
        return torch.stack([_packed_rows(key, spec, outliers, matrix) for matrix in rows])
    rows = torch.cat((torch.zeros_like(rows[:, :outliers]), rows[:, outliers:]), 1)
    packed: Tensor = getattr(pack_weights(rows, spec), key)
    return packed.view(torch.uint8)


def _first_columns(count: int, rows: Tensor) -> Tensor:
    return rows[:, :count].to(torch.float16).view(torch.uint8)


class MatrixStore(PackedStore):
    """Base class of modules with one packed matrix: `packed`, `scales`, `minima`.

    With `outlier_ratio`, `outlier_columns` contains the indices of the input columns that
    `outlier_weight` stores in 16 bits.
    """

    packed: nn.Parameter
    rows: int
    columns: int

    def _make(self, plain: nn.Module, sizes: tuple[int, int], spec: QuantSpec) -> None:
        """Create the uninitialized parameters that replace an unquantized `weight`."""
        weight: Any = plain.weight
        self.columns, self.rows = sizes
        self.register_parameter("weight", None)
        self._keep(spec, weight.dtype, weight.device)
        self._add_matrix("", (self.rows, self.columns), weight.device)
        count = round(spec.outlier_ratio * self.columns)
        self.outlier_columns = self.outlier_weight = None
        if spec.outlier_ratio:
            count = max(1, count)
            empty = torch.zeros(self.rows, 2 * count, dtype=torch.uint8, device=weight.device)
            columns = torch.arange(count, dtype=torch.int32, device=weight.device)
            self.outlier_columns = nn.Parameter(columns, requires_grad=False)
            self.outlier_weight = nn.Parameter(empty, requires_grad=False)

    def fill_(self, weight: Tensor) -> None:
        """Quantize a weight (rows, columns) into the parameters."""
        if self.outlier_columns is None or self.outlier_weight is None:
            self._take("", weight)
            return
        columns = _find_outliers(weight, self.spec, self.outlier_columns.numel())
        self.outlier_columns.data.copy_(columns)
        space = weight[:, columns].to(torch.float16)
        self.outlier_weight.data.copy_(space.view(torch.uint8))
        self._take("", weight.index_fill(1, columns, 0))

    def take_packed_(self, matrix: PackedMatrix) -> None:
        """Copy a matrix that is already packed with the same scheme."""
        self.put_("", matrix)

    def share_(self, other: MatrixStore) -> None:
        """Tie this module to another one of the same size by sharing its parameters."""
        for key in ("packed", "scales", "minima", "outlier_columns", "outlier_weight"):
            setattr(self, key, getattr(other, key))

    def tensor_notes(self) -> Mapping[str, TensorNote]:
        """Return how the tensors are initialized: the unquantized weight is sampled, then packed.

        The first columns of a sampled weight are stored as outliers.
        """
        shape = self.rows, self.columns
        if self.outlier_columns is None:
            return self._notes("", "weight", shape)
        count = self.outlier_columns.numel()
        outlier_init = Derived("weight", shape, partial(_first_columns, count))
        return self._notes("", "weight", shape, count) | {
            "outlier_columns": TensorNote("numbers", trains=False),
            "outlier_weight": TensorNote(outlier_init, trains=False),
        }

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``x @ weight.T + bias`` in the dtype of x.

        Shape:
            x: (..., columns) -> (..., rows)
        """
        if x.dtype == torch.float64 and self.spec.activations == "float":
            return F.linear(x, self.dense(x.dtype), None if bias is None else bias.to(x.dtype))
        flat = x.reshape(-1, self.columns)
        if self.outlier_columns is not None or x.dtype == torch.float64:
            flat = flat.float()
            bias = None if bias is None else bias.float()
        elif x.dtype == torch.float32 and x.is_cpu and torch.is_autocast_enabled("cpu"):
            flat = self._autocast(flat)
        inside = flat if self.outlier_columns is None else self._without_outliers(flat)
        wants = torch.is_grad_enabled() and (
            x.requires_grad or (bias is not None and bias.requires_grad)
        )
        matrix = PackedMatrix(*self._tensors())
        # Call the kernel directly if untraced: torch's dispatch costs more than some products.
        is_seen = is_tracing() or torch.autograd._profiler_enabled()
        if wants or is_seen or not are_plain_cpu_tensors(inside, bias, *matrix):
            run: Any = torch.ops.bmforge.multiply_packed
            if wants:
                from bmforge.nn.packed_autograd import Product  # for training only

                run = Product.apply
            out = run(inside, *matrix, self.rows, encode_spec(self.spec), bias)
        else:
            out = multiply_packed(inside, matrix, self.rows, self.spec, bias)
        if self.outlier_weight is not None and self.outlier_columns is not None:
            outside = flat.index_select(1, self.outlier_columns)
            out = out + F.linear(outside, self.outlier_weight.view(torch.float16).float())
        return out.view(*x.shape[:-1], self.rows).to(x.dtype)

    def _autocast(self, x: Tensor) -> Tensor:
        """Convert many tokens to the dtype of autocast, as torch does for a linear layer."""
        dtype = torch.get_autocast_dtype("cpu")
        is_fast = product_dtype(dtype) == dtype and not is_tracing() and self.takes_panels(x)
        return x.to(dtype) if is_fast else x

    def takes_panels(self, x: Tensor) -> bool:
        """Return True if `x` is multiplied by panels in its own dtype; see `nn.panel_products`."""
        is_many = x.dim() > 1 and x.numel() > FEW_TOKENS * self.columns
        has_panels = self.spec.activations == "float" and self.outlier_columns is None
        if not (is_many and has_panels and x.is_cpu and x.shape[-1] == self.columns):
            return False
        is_own = product_dtype(x.dtype) == x.dtype and are_plain_cpu_tensors(*self._tensors())
        return is_own and load_kernels() is not None

    def _without_outliers(self, x: Tensor) -> Tensor:
        assert self.outlier_columns is not None
        return x.index_fill(1, self.outlier_columns.long(), 0.0)

    def plain(self, key: str) -> Tensor:
        """Return the dequantized weight in fp32."""
        return self.dense(torch.float32)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized weight, (rows, columns), in `dtype`."""
        return self.dense_rows(0, self.rows, dtype)

    def dense_rows(self, first: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return rows `first` to `stop` of the dequantized weight, (stop - first, columns)."""
        start, end = first // PANEL_ROWS, -(-stop // PANEL_ROWS)
        panels = [None if t is None else t[start:end] for t in self._tensors()]
        until = min(end * PANEL_ROWS, self.rows) - start * PANEL_ROWS
        out = torch.ops.bmforge.dequantize(*panels, until, encode_spec(self.spec))
        offset = start * PANEL_ROWS
        out = out[first - offset : stop - offset]
        return self._with_outliers(out, 1, slice(first, stop)).to(dtype)

    def _with_outliers(self, rows: Tensor, dim: int, index: Tensor | slice) -> Tensor:
        if self.outlier_weight is None or self.outlier_columns is None:
            return rows
        outliers = self.outlier_weight.view(torch.float16)[index].float()
        return rows.index_copy(dim, self.outlier_columns.long(), outliers)


@dataclass(frozen=True)
class PackedRows:
    """Packed matrix with the interface of a tensor; slicing dequantizes the selected rows.

    Args:
        store: module with the packed matrix.
        dtype: dtype of the dequantized rows.
    """

    store: MatrixStore
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix, (rows, columns)."""
        return torch.Size((self.store.rows, self.store.columns))

    @property
    def rows_at_once(self) -> int:
        """Number of rows to dequantize at a time, a multiple of 16 (see `nn.packing`)."""
        return max(1, _NUMBERS_AT_ONCE // (self.store.columns * PANEL_ROWS)) * PANEL_ROWS

    def __getitem__(self, rows: slice) -> Tensor:
        first, stop, _ = rows.indices(self.store.rows)
        return self.store.dense_rows(first, stop, self.dtype)

    def detach(self) -> PackedRows:
        """Return self: packed weights have no gradient."""
        return self


def _find_outliers(weight: Tensor, spec: QuantSpec, count: int) -> Tensor:
    """Return, in ascending order, the input columns with the largest quantization error.

    The error of a group depends on its largest value, which determines the scale, so the error is
    attributed to the column of that value.
    """
    columns = weight.shape[1]
    total = torch.zeros(columns, dtype=torch.float64, device=weight.device)
    first = torch.arange(0, columns, spec.group_of(columns), device=weight.device)
    for part in weight.detach().split(_rows_at_once(weight)):
        packed = pack_weights(part, spec)
        error = part.float() - unpack_matrix(packed, part.shape[0], spec)
        by_group = (part.shape[0], -1, spec.group_of(columns))
        largest = part.reshape(by_group).abs().argmax(-1) + first
        total.index_add_(
            0, largest.flatten(), error.view(by_group).double().square().sum(-1).flatten()
        )
    return total.topk(count).indices.sort().values

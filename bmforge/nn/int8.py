"""Linear layers, heads, embeddings and experts with weights stored as int8 rows.

Every row of a matrix is stored as integers from -127 to 127 and one scale. Results are
bit-identical to those of an unquantized layer with the weight ``rows * scale`` in the compute
dtype. The rows are ordinary parameters without gradient, so layouts, streaming and checkpoints
handle them like any other tensor; gradients flow to the input, so that attached adapters can be
trained.

Source: absmax quantization by rows, as in Dettmers et al., "LLM.int8()" (2022), without outliers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.nn.grouped import grouped_linear
from bmforge.nn.head import LMHead
from bmforge.nn.low_rank import linear_sizes
from bmforge.nn.moe import Experts
from bmforge.nn.part import Derived, TensorNote
from bmforge.shards import local_tensor

__all__ = ["Int8Embedding", "Int8Experts", "Int8Head", "Int8Linear", "RowStore", "store_int8"]

_LARGEST = 127
_EXPERT_KEYS = ("gate_proj", "up_proj", "down_proj")


def quantize_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row of a matrix to int8; return integers and scales (0 for a row of zeros).

    Shape:
        matrix: (..., rows, columns); returns (..., rows, columns) int8 and (..., rows) fp32
    """
    wide = matrix.detach().float()
    scale = wide.abs().amax(-1) / _LARGEST
    safe = scale.where(scale > 0, 1.0)
    return (wide / safe[..., None]).round().to(torch.int8), scale


def _rows_only(matrix: Tensor) -> Tensor:
    return quantize_rows(matrix)[0]


def _scales_only(matrix: Tensor) -> Tensor:
    return quantize_rows(matrix)[1]


def _dequantize(rows: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return rows.to(dtype) * scale.to(dtype)[..., None]


class _Product(torch.autograd.Function):
    """Autograd function of ``x @ (rows * scale).T``; backward dequantizes the weight again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, scale)
        ctx.has_bias = bias is not None
        return F.linear(x, _dequantize(rows, scale, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, scale = ctx.saved_tensors
        grad, x_grad, bias_grad = grads[0], None, None
        if ctx.needs_input_grad[0]:
            x_grad = grad @ _dequantize(rows, scale, grad.dtype)
        if ctx.has_bias and ctx.needs_input_grad[3]:
            bias_grad = grad.flatten(0, -2).sum(0)
        return x_grad, None, None, bias_grad


class _GroupedProduct(torch.autograd.Function):
    """Autograd function like `_Product` for stacked expert matrices; see `grouped_linear`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, scale: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, scale, ends)
        return grouped_linear(x, _dequantize(rows, scale, x.dtype), ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, scale, ends = ctx.saved_tensors
        matrices = _dequantize(rows, scale, grads[0].dtype)
        return grouped_linear(grads[0], matrices.transpose(1, 2), ends), None, None, None


def _note_rows(base: str, shape: tuple[int, ...], shard_dims: Mapping[str, int]) -> TensorNote:
    return TensorNote(Derived(base, shape, _rows_only), shard_dims, trains=False)


def _note_scales(base: str, shape: tuple[int, ...], shard_dims: Mapping[str, int]) -> TensorNote:
    """Return the initialization and sharding of the scales.

    Scales are sharded like the rows, and replicated if the columns are sharded.

    Args:
        base: name of the unquantized weight.
        shape: shape of this weight.
        shard_dims: see `TensorNote`.
    """
    return TensorNote(Derived(base, shape, _scales_only), shard_dims, trains=False)


_BY_ROWS = dict.fromkeys(
    ("column", "key_value", "embedding", "head", "own_column", "gathered_column"), 0
)


class RowStore:
    """Base class of modules with one quantized matrix: int8 `weight` and its `scale`."""

    weight: Any
    scale: nn.Parameter

    def take_rows_(self, weight: Tensor, scale: Tensor) -> None:
        """Store int8 rows and scales; tied layers store the same Parameter objects."""
        self.weight = _frozen(weight)
        self.scale = _frozen(scale)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return this rank's rows, dequantized to `dtype`."""
        return _dequantize(local_tensor(self.weight), local_tensor(self.scale), dtype)

    def tensor_notes(self) -> Mapping[str, TensorNote]:
        """Return the tensors' initialization and sharding: those of an unquantized weight."""
        shape = tuple(self.weight.shape)
        return {
            "weight": _note_rows("weight", shape, _BY_ROWS | {"row": 1, "split_row": 1}),
            "scale": _note_scales("weight", shape, _BY_ROWS),
        }


def _frozen(tensor: Tensor) -> nn.Parameter:
    if isinstance(tensor, nn.Parameter):
        return tensor
    return nn.Parameter(tensor, requires_grad=False)


class Int8Linear(RowStore, nn.Linear):
    """Linear layer with int8 weights; computes in the dtype of its input.

    Args:
        in_features: number of input features.
        out_features: number of output features.
        bias: bias of the unquantized layer, or None.

    Shape:
        x: (..., in) -> (..., out)
    """

    def __init__(self, in_features: int, out_features: int, bias: nn.Parameter | None) -> None:
        super().__init__(in_features, out_features, bias=False, device="meta")
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """Apply the linear layer."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return _Product.apply(x, self.weight, self.scale, bias)


class Int8Head(RowStore, LMHead):
    """Language model head with int8 weights; the weight gets no gradient.

    Args:
        head: unquantized head, not yet parallelized.
    """

    def __init__(self, head: LMHead) -> None:
        super().__init__(head.in_features, head.out_features, bias=False, device="meta")
        self.bias, self.softcap = head.bias, head.softcap

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """Return this rank's rows, dequantized to `dtype`."""
        return _dequantize(self.weight, self.scale, dtype)


class Int8Embedding(RowStore, nn.Embedding):
    """Token embedding with int8 weights.

    Args:
        table: unquantized embedding.

    Shape:
        ids: (...) -> (..., D), in the dtype of the scales
    """

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__(
            table.num_embeddings, table.embedding_dim, table.padding_idx, device="meta"
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Look up and dequantize the embeddings of token ids."""
        return _dequantize(self.weight[ids], self.scale[ids], self.scale.dtype)


class Int8Experts(Experts):
    """Stacked experts with int8 weights and one scale per row of every matrix.

    Args:
        experts: unquantized experts.
    """

    def __init__(self, experts: Experts) -> None:
        nn.Module.__init__(self)
        self.keep_settings_of_(experts)
        for key in _EXPERT_KEYS:
            matrices = getattr(experts, key)
            if matrices is None:
                self.register_parameter(key, None)
                continue
            rows, scale = _quantize_like(matrices)
            self.register_parameter(key, _frozen(rows))
            self.register_parameter(f"{key}_scale", _frozen(scale))

    def multiply(self, key: str, x: Tensor, ends: Tensor) -> Tensor:
        """Multiply each expert's rows by its dequantized matrix `key`."""
        return _GroupedProduct.apply(x, getattr(self, key), getattr(self, f"{key}_scale"), ends)

    def tensor_notes(self) -> Mapping[str, TensorNote]:
        """Return the tensors' initialization and sharding (along the experts' hidden width)."""
        notes = {}
        for key in _EXPERT_KEYS:
            if getattr(self, key) is None:
                continue
            shape, is_last = tuple(getattr(self, key).shape), key == "down_proj"
            notes[key] = _note_rows(key, shape, {"experts": 2 if is_last else 1})
            shard_dims = {} if is_last else {"experts": 1}
            notes[f"{key}_scale"] = _note_scales(key, shape, shard_dims)
        return notes


def _quantize_like(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a parameter to int8 rows and scales of its dtype; supports meta tensors."""
    if matrix.is_meta:
        rows = torch.empty(matrix.shape, dtype=torch.int8, device="meta")
        return rows, torch.empty(matrix.shape[:-1], dtype=matrix.dtype, device="meta")
    rows, scale = quantize_rows(matrix)
    return rows, scale.to(matrix.dtype)


def store_int8(module: nn.Module, stored: dict[int, tuple[Tensor, Tensor]]) -> nn.Module:
    """Return the int8 replacement of a module.

    Args:
        module: a linear layer, a head, an embedding, or stacked experts.
        stored: mapping from the `id` of a converted weight to its int8 tensors, which tied weights
            share; updated in place.

    Raises:
        ConfigError: the module is not supported or already quantized.
    """
    if isinstance(module, (RowStore, Int8Experts)):
        raise ConfigError(
            f"a {type(module).__name__} is already stored as int8. Exclude it from `where`."
        )
    if isinstance(module, Experts):
        return Int8Experts(module)
    sizes = linear_sizes(module)
    new: Any
    if isinstance(module, LMHead):
        new = Int8Head(module)
    elif isinstance(module, nn.Embedding):
        new = Int8Embedding(module)
    elif sizes is not None and getattr(module, "weight", None) is not None:
        bias: Any = module.bias
        new = Int8Linear(*sizes, bias)
    else:
        raise ConfigError(
            f"a {type(module).__name__} cannot be stored as int8 rows (supported: linear "
            "layers, heads, embeddings and experts)."
        )
    plain: Any = module.weight
    key = id(plain)
    if key not in stored:
        matrix = plain.detach()
        rows, scale = _quantize_like(matrix.t() if hasattr(module, "nf") else matrix)
        stored[key] = _frozen(rows.contiguous()), _frozen(scale)
    new.take_rows_(*stored[key])
    new.train(module.training)
    return new

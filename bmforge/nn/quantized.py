"""Linear layers, heads, embeddings and experts with packed integer weights.

These modules replace the unquantized modules and support the same calls. Gradients flow to the
input through the dequantized weights; the rounding of activations uses a straight-through
estimator.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.nn.foreign_experts import (
    PackedForeignExperts,
    foreign_stacks,
    is_foreign_experts,
)
from bmforge.nn.head import LMHead
from bmforge.nn.low_rank import linear_sizes
from bmforge.nn.moe import Experts
from bmforge.nn.packed_experts import StackStore
from bmforge.nn.packed_linear import QuantizedLinear
from bmforge.nn.packed_store import MatrixStore, PackedRows, PackedStore
from bmforge.nn.packing import PackedMatrix, QuantSpec, dequantize_stack, pick_rows
from bmforge.nn.products import are_plain_cpu_tensors, encode_spec, load_kernels
from bmforge.nn.shard_hooks import HeadRows
from bmforge.nn.tracing import is_tracing

__all__ = [
    "MatrixStore",
    "PackedStore",
    "QuantizedEmbedding",
    "QuantizedExperts",
    "QuantizedHead",
    "QuantizedLinear",
    "pick_packed",
    "element_scales",
    "plain_weights",
    "store_packed",
]

_EXPERT_KEYS = ("gate_proj", "up_proj", "down_proj")


class QuantizedHead(MatrixStore, LMHead):
    """Language model head with packed weights; the weight gets no gradient."""

    def __init__(self, plain: LMHead, spec: QuantSpec) -> None:
        sizes = plain.in_features, plain.out_features
        nn.Linear.__init__(self, *sizes, bias=False, device="meta")
        self.bias: Any = plain.bias
        self.softcap = plain.softcap
        self._make(plain, sizes, spec)

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized weight in `dtype`, for the loss."""
        return self.dense(dtype)

    def sliced(self, dtype: torch.dtype) -> HeadRows:
        """Return the weight, dequantized slice by slice (under `torch.compile` all at once)."""
        return self.dense(dtype) if torch.compiler.is_compiling() else PackedRows(self, dtype)

    def score(self, x: Tensor) -> Tensor:
        """Return the logits, without adapters."""
        return self.multiply(x, self.bias)


class QuantizedEmbedding(MatrixStore, nn.Embedding):
    """Token embedding with packed weights.

    Shape:
        ids: (...) -> (..., D), in the model's dtype
    """

    def __init__(self, plain: nn.Embedding, spec: QuantSpec) -> None:
        sizes = plain.num_embeddings, plain.embedding_dim
        # A given weight is not initialized: `normal_` on the meta device imports torch._dynamo,
        # which takes 5 s.
        weight = torch.empty(sizes, device="meta")
        nn.Embedding.__init__(self, *sizes, plain.padding_idx, _weight=weight)
        self._make(plain, sizes[::-1], spec)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up and dequantize the embeddings of token ids."""
        rows = pick_packed(ids, PackedMatrix(*self._tensors()), self.rows, self.spec)
        return self._with_outliers(rows, rows.dim() - 1, ids).to(self.like.dtype)


def pick_packed(index: Tensor, matrix: PackedMatrix, rows: int, spec: QuantSpec) -> Tensor:
    """Dequantize the selected rows of a packed matrix to fp32, by the fastest implementation.

    Shape:
        index: (...) integers; returns (..., columns)

    Raises:
        IndexError: an index is out of range (checked on the CPU, outside functorch transforms).
    """
    if (
        type(index) is not Tensor
        or not index.is_cpu
        or is_tracing()
        or not are_plain_cpu_tensors(*matrix)
    ):
        return pick_rows(matrix, index, spec)
    flat, kernels = index.long().flatten().contiguous(), load_kernels()
    picked: Tensor | None = None
    if kernels is not None:
        picked = kernels.pick(matrix, flat, rows, spec)
    elif not ((flat < 0) | (flat >= rows)).any():
        picked = pick_rows(matrix, flat, spec)
    if picked is None:
        raise IndexError(
            f"token ids are out of range: {int(flat.min())} to {int(flat.max())} (allowed: 0 to "
            f"{rows - 1}). Use the tokenizer of the model."
        )
    return picked.view(*index.shape, picked.shape[1])


class QuantizedExperts(StackStore, Experts):
    """Stacked experts with packed weights.

    Args:
        plain: experts to replace; their weights are quantized by `fill_`.
        spec: quantization scheme.
    """

    def __init__(self, plain: Experts, spec: QuantSpec) -> None:
        nn.Module.__init__(self)
        self.keep_settings_of_(plain)
        for key in _EXPERT_KEYS:
            self.register_parameter(key, None)
        self._make_stacks(plain.stack_sizes(), spec, plain.up_proj)

    def has_gate(self) -> bool:
        """Return True if the experts have a `gate_proj`."""
        return "gate_proj" in self._sizes

    def extra_repr(self) -> str:
        """Return the sizes as text."""
        experts, outer, inner = self._sizes["down_proj"]
        return f"{experts} x ({outer}, {inner}), gated={self.has_gate()}, {self.spec.bits} bits"


def element_scales(store: PackedStore, key: str) -> Tensor | None:
    """Return the scale of each integer of a packed parameter: an fp32 tensor of the same shape.

    Returns None if the values are not integers times scales (groups with minima, or outlier
    columns).

    Args:
        store: module with packed weights.
        key: parameter name in the unquantized module.
    """
    is_stack = isinstance(store, QuantizedExperts)
    packed, scales, minima = store._tensors(f"{key}_" if is_stack else "")
    if minima is not None or store.spec.outlier_ratio:
        return None
    # Integers that are all 1 dequantize to their scales; 4 bits store 1 as 9 in both halves.
    ones = torch.full_like(packed, 1 if store.spec.bits == 8 else 0x99)
    spec = encode_spec(store.spec)
    if isinstance(store, QuantizedExperts):
        return dequantize_stack(ones, scales, None, store.stack_sizes()[key][1], spec)
    assert isinstance(store, MatrixStore)
    dense: Tensor = torch.ops.bmforge.dequantize(ones, scales, None, store.rows, spec)
    return dense


def store_packed(module: nn.Module, spec: QuantSpec) -> PackedStore:
    """Return the packed replacement of a module, uninitialized.

    Args:
        module: a linear layer, a head, an embedding, or stacked experts.
        spec: quantization scheme.

    Raises:
        ConfigError: the module is not supported or already quantized, or its width cannot be
            packed.
    """
    if isinstance(module, PackedStore) or type(module).__name__.startswith("Int8"):
        raise ConfigError(
            f"a {type(module).__name__} is already quantized. Exclude it from `where`, or load "
            "the unquantized model."
        )
    new: Any
    if is_foreign_experts(module):
        new = PackedForeignExperts(module, spec)
    elif isinstance(module, Experts):
        new = QuantizedExperts(module, spec)
    elif isinstance(module, LMHead):
        new = QuantizedHead(module, spec)
    elif isinstance(module, nn.Embedding):
        new = QuantizedEmbedding(module, spec)
    elif linear_sizes(module) is not None and getattr(module, "weight", None) is not None:
        new = QuantizedLinear(module, spec)
    else:
        raise ConfigError(
            f"a {type(module).__name__} cannot be quantized (supported: linear layers, heads, "
            "embeddings and experts)."
        )
    return new.train(module.training)


def plain_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the key and matrix of each weight that `store_packed` packs.

    Matrices are (rows, columns), stacks (E, ...). Tied layers yield the same tensor.
    """
    if is_foreign_experts(module):
        for key, stack in foreign_stacks(module).items():
            yield key, stack.detach()
    elif isinstance(module, Experts):
        for key in module.stack_sizes():
            yield key, getattr(module, key).detach()
    else:
        weight: Any = module.weight
        yield "weight", weight.detach().t() if hasattr(module, "nf") else weight.detach()

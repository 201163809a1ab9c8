"""Linear layers with packed weights, and products of several layers with the same input.

On accelerators with Triton, layers of one quantization scheme that read the same input are
multiplied by one kernel: the input is quantized once, and one launch replaces up to three.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.nn.adapter_selection import adapter_choice_of
from bmforge.nn.device_kernels import can_use_device_kernels
from bmforge.nn.low_rank import LowRank, linear_sizes
from bmforge.nn.norm import RMSNorm
from bmforge.nn.packed_store import MatrixStore
from bmforge.nn.packing import PackedMatrix, QuantSpec
from bmforge.nn.part import Joined, adapters_of, join_parts
from bmforge.nn.products import FEW_DEVICE_TOKENS, can_quantize_groups_on_device, encode_spec
from bmforge.nn.quantized_rows import QuantizedRows
from bmforge.nn.shard_hooks import identity
from bmforge.nn.tracing import is_tracing
from bmforge.nn.triton_kernels import load_triton

__all__ = ["QuantizedLinear", "joint_group", "multiply_jointly", "quantize_gated", "quantize_norm"]


class QuantizedLinear(MatrixStore, nn.Linear):
    """Linear layer with packed weights; returns the dtype of its input (see `multiply_packed`).

    Args:
        plain: layer to replace; its weights are quantized by `fill_`.
        spec: quantization scheme.

    Shape:
        x: (..., in) -> (..., out)
    """

    def __init__(self, plain: nn.Module, spec: QuantSpec) -> None:
        sizes = linear_sizes(plain)
        assert sizes is not None
        nn.Linear.__init__(self, *sizes, bias=False, device="meta")
        self.bias: Any = plain.bias
        self._make(plain, sizes, spec)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the linear layer; in training, with its LoRA if one function computes both."""
        adapter = self._fused_adapter(x)
        if adapter is None:
            return self.multiply(x, self.bias)
        joined: Tensor = Joined(adapter(x, layer=self))  # type: ignore[assignment]
        return joined

    def _fused_adapter(self, x: Tensor) -> LowRank | None:
        """Return the only adapter if one autograd function can compute its update and the product.

        This requires that the hook of the adapters is the layer's first forward hook.
        """
        hooks = self._forward_hooks
        if not hooks or not torch.is_grad_enabled() or next(iter(hooks.values())) is not join_parts:
            return None
        every: Any = nn.modules.module
        if every._global_forward_hooks or "forward" in vars(self) or is_tracing():
            return None
        adapters = [adapter for _, adapter in adapters_of(self)]
        if len(adapters) != 1 or type(adapters[0]) is not LowRank:
            return None
        choice = adapter_choice_of(adapters[0])
        if choice.weight != 1 or choice.samples is not None or adapters[0].magnitude is not None:
            return None
        return adapters[0] if type(x) is Tensor and self.takes_panels(x) else None

    def multiply_adapted(self, x: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
        """Return ``x @ weight.T + bias + scale * x @ down.T @ up.T``, in one autograd function.

        `takes_panels` must be true for x, and all tensors must have the same dtype.

        Shape:
            x: (..., columns); down: (R, columns); up: (rows, R); returns (..., rows)
        """
        from bmforge.nn.adapted_product import AdaptedProduct  # for training only

        matrix, bias = PackedMatrix(*self._tensors()), self.bias
        bias = None if bias is None else bias.to(x.dtype)
        numbers = encode_spec(self.spec)
        return AdaptedProduct.apply(x, down, up, bias, scale, matrix, self.rows, numbers)


def joint_group(x: Tensor, layers: Sequence[nn.Module | None]) -> int:
    """Return the group size in which `multiply_jointly` quantizes `x` for these layers.

    Returns 0 if the layers must be called one by one.
    """
    first = layers[0] if layers else None
    if type(first) is not QuantizedLinear or first.spec.activations != "int8":
        return 0
    tokens, columns = x.numel() // max(1, x.shape[-1]), first.columns
    if not 0 < tokens <= FEW_DEVICE_TOKENS or x.shape[-1] != columns:
        return 0
    if not can_use_device_kernels(x) or not can_quantize_groups_on_device(first.spec, columns):
        return 0
    if not all(_is_like(first, layer) for layer in layers) or load_triton(x.device) is None:
        return 0
    return first.spec.group_of(columns)


def _is_like(first: QuantizedLinear, layer: nn.Module | None) -> bool:
    """Return True if a layer computes only a product, with the scheme and input of `first`."""
    if type(layer) is not QuantizedLinear:
        return False
    if not _is_undisturbed(layer) or layer.outlier_columns is not None:
        return False
    same = (layer.spec, layer.columns) == (first.spec, first.columns)
    return same and (layer.bias is None) == (first.bias is None)


def multiply_jointly(x: Tensor | QuantizedRows, layers: Sequence[nn.Module]) -> list[Tensor]:
    """Return the outputs of several linear layers for the same input, in one kernel if possible.

    Args:
        x: input; if quantized, in groups of `joint_group`.
        layers: at most three layers.

    Shape:
        x: (..., columns) -> (..., rows) for each layer
    """
    quantized = x if isinstance(x, QuantizedRows) else _quantize(x, layers)
    if quantized is None:
        return [layer(x) for layer in layers]
    return _multiply(quantized, layers)


def quantize_gated(gate: Tensor, up: Tensor, reader: nn.Module) -> QuantizedRows | None:
    """Return ``silu(gate) * up``, quantized for the layer `reader`, whose input it is.

    Returns None if one kernel cannot compute the result.

    Shape:
        gate, up: (..., columns)
    """
    if gate.shape != up.shape or not can_use_device_kernels(gate, up):
        return None
    return _quantize(gate, (reader,), up)


def quantize_norm(
    x: Tensor, residual: Tensor | None, norm: nn.Module, reader: nn.Module | None
) -> tuple[Tensor, QuantizedRows] | None:
    """Return ``residual + x``, and its RMS norm quantized for the projections of a sublayer.

    Returns None if one kernel cannot compute the results.

    Args:
        x: hidden states, of the dtype of the norm's weight.
        residual: tensor that is added to `x`; None to return `x` itself.
        norm: RMS norm.
        reader: attention or MLP whose input is the norm.

    Shape:
        x, residual: (..., D)
    """
    if type(norm) is not RMSNorm or norm.offset or not _is_undisturbed(norm):
        return None
    weight, group = norm.weight, _group_read(x, reader)
    if not group or not can_use_device_kernels(x, weight):
        return None
    width, rows = x.shape[-1], None if residual is None else residual.view(-1, x.shape[-1])
    total, *parts = torch.ops.bmforge.quantize_norm(
        x.view(-1, width), rows, weight, norm.eps, group
    )
    values, scales, sums = parts
    quantized = QuantizedRows(values, scales, sums, x.dtype, x.shape[:-1])
    return x if residual is None else total.view(x.shape), quantized


def _group_read(x: Tensor, reader: Any) -> int:
    """Return the group size of `x` quantized for a sublayer, a power of two; 0 if unsupported."""
    # A subclass with another forward may need the hidden states themselves.
    if not {"forward", "projections"} <= vars(type(reader)).keys() or not _is_undisturbed(reader):
        return 0
    if reader.input_fn is not identity:
        return 0
    group = joint_group(x, reader.projections())
    return 0 if group & (group - 1) or x.shape[-1] > 1 << 14 else group


def _is_undisturbed(module: nn.Module) -> bool:
    """Return True if no hook runs around a module, and its forward is not wrapped."""
    every: Any = nn.modules.module
    hooks = module._forward_hooks or module._forward_pre_hooks
    hooks = hooks or every._global_forward_hooks or every._global_forward_pre_hooks
    return not hooks and "forward" not in vars(module)


def _quantize(
    x: Tensor, layers: Sequence[nn.Module | None], up: Tensor | None = None
) -> QuantizedRows | None:
    """Return `x`, or ``silu(x) * up``, quantized; None if the layers must be called one by one."""
    group = joint_group(x, layers)
    if not group:
        return None
    rows, ups = (None if t is None else t.view(-1, t.shape[-1]) for t in (x, up))
    values, scales, sums = torch.ops.bmforge.quantize_rows(rows, ups, group)
    return QuantizedRows(values, scales, sums, x.dtype, x.shape[:-1])


def _multiply(x: QuantizedRows, layers: Sequence[Any]) -> list[Tensor]:
    packed, scales, minima = zip(*(layer._tensors() for layer in layers), strict=True)
    outs = torch.ops.bmforge.multiply_jointly(
        x.values,
        x.scales,
        x.sums,
        packed,
        scales,
        [] if minima[0] is None else minima,
        [] if layers[0].bias is None else [layer.bias for layer in layers],
        [layer.rows for layer in layers],
        encode_spec(layers[0].spec),
        x.dtype,
    )
    return [out.view(*x.shape, -1) for out in outs]

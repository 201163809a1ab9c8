"""Products of packed matrices and activations: compiled kernels, with torch as fallback.

The result is bit-identical for every implementation and batch size: activations are quantized by
groups, products within a group are summed as integers, and the groups' sums, multiplied by the
scales of weight and activations, are added sequentially in fp32. Float activations are the
exception: torch sums them in its own order.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bmforge.native import say_once
from bmforge.nn.packing import (
    Integers,
    PackedMatrix,
    QuantSpec,
    by_panels,
    narrow_scales,
    pack_matrix,
    packed_shapes,
    quantize_groups,
    unpack_matrix,
)
from bmforge.nn.plain_products import matches_torch, multiply_plain
from bmforge.nn.product_kernels import (
    PLAIN_KINDS,
    Kernels,
    compile_variant,
    runnable_variants,
)
from bmforge.nn.tracing import is_tracing
from bmforge.nn.triton_kernels import load_triton

__all__ = [
    "FEW_DEVICE_TOKENS",
    "FEW_TOKENS",
    "Kernels",
    "decode_spec",
    "dequantize",
    "lacks_optimized_product",
    "load_kernels",
    "load_variant",
    "multiply_dense",
    "multiply_packed",
    "encode_spec",
    "pack_groups",
    "pack_weights",
    "product_dtype",
    "runnable_variants",
    "are_plain_cpu_tensors",
    "can_quantize_groups_on_device",
]

# With more tokens than this, dequantizing and torch's product are faster.
FEW_TOKENS = 16
# The same on accelerators: integer sums by groups run outside of the tensor cores.
FEW_DEVICE_TOKENS = 64
# Triton quantizes a group of activations in the registers of one program.
_WIDEST_DEVICE_GROUP = 1 << 15
# Rows and elements of a weight that are widened to fp32 at a time: at most 4 MiB, which stay in the
# cache. More than 512 rows are no faster, and fewer than 256 are slower by 3 % and more.
_PANEL_ROWS, _PANEL_NUMBERS = 512, 1 << 20


@cache
def load_variant(name: str) -> Kernels | None:
    """Return the kernels of one variant; None if they do not compile or do not match torch."""
    kernels = compile_variant(name)
    if kernels is not None and not matches_torch(kernels):
        say_once(
            f"the kernels for {name} are not used, because their results differ from "
            "torch's on this machine. Set $CXX to another compiler."
        )
        return None
    return kernels


@cache
def load_kernels() -> Kernels | None:
    """Return the matrix-product kernels for this CPU; None if there is no C++ compiler."""
    return load_variant(runnable_variants()[0])


def pack_weights(matrix: Tensor, spec: QuantSpec) -> PackedMatrix:
    """Quantize and pack a matrix (rows, columns) of any dtype.

    Raises:
        ConfigError: a value is not finite, or too large for the scales' dtype.
    """
    kernels = load_kernels() if spec.symmetric and matrix.is_cpu else None
    if kernels is None:
        return pack_matrix(quantize_groups(matrix, spec), spec)
    packed, scales = kernels.pack(matrix.detach().float().contiguous(), spec)
    return PackedMatrix(packed, narrow_scales(scales, spec), None)


def pack_groups(
    integers: Tensor,
    scales: Tensor,
    minima: Tensor | None,
    spec: QuantSpec,
    out: Tensor | None = None,
) -> PackedMatrix:
    """Pack the integers of a quantized matrix on the CPU.

    Args:
        integers: groups of adjacent integers of each row; groups need not be adjacent in memory.
        scales: one scale per group.
        minima: one minimum per group; None if they are 0.
        spec: quantization scheme with groups of W columns.
        out: contiguous memory for the packed integers; if None, it is allocated.

    Shape:
        integers: (rows, G, W) int8; scales, minima: (rows, G); out: see `packed_shapes`

    Raises:
        ConfigError: a scale or minimum is not finite in the scheme's dtype.
    """
    kernels = load_kernels()
    scales = narrow_scales(scales, spec)
    minima = None if minima is None else narrow_scales(minima, spec)
    if kernels is None:
        return pack_matrix(Integers(integers.flatten(1), scales, minima), spec)
    integers = integers if integers.stride(-1) == 1 else integers.contiguous()
    if out is None:
        shape = packed_shapes(len(scales), integers[0].numel(), spec)["packed"]
        out = torch.empty(shape, dtype=torch.uint8)
    kernels.pack_integers(integers, spec, out)
    return PackedMatrix(out, by_panels(scales), None if minima is None else by_panels(minima))


def are_plain_cpu_tensors(*tensors: Tensor | None) -> bool:
    """Return True if all tensors are contiguous CPU tensors, and none is of a tensor subclass."""
    plain = (Tensor, torch.nn.Parameter)  # subclasses may have no storage of their own
    return all(
        t is None or (type(t) in plain and t.is_cpu and t.is_contiguous() and not t.is_neg())
        for t in tensors
    )


def dequantize(matrix: PackedMatrix, rows: int, spec: QuantSpec) -> Tensor:
    """Dequantize a packed matrix to fp32, (rows, columns)."""
    packed = matrix.packed
    on_device = None if packed.is_cpu or packed.is_meta else load_triton(packed.device)
    if on_device is not None:
        return on_device.dequantize(matrix, rows, spec, torch.float32)
    kernels = load_kernels() if are_plain_cpu_tensors(*matrix) else None
    if kernels is None:
        return unpack_matrix(matrix, rows, spec)
    return kernels.unpack(matrix, rows, spec)


def multiply_packed(
    x: Tensor, matrix: PackedMatrix, rows: int, spec: QuantSpec, bias: Tensor | None = None
) -> Tensor:
    """Return ``x @ matrix.T + bias``, computed by the fastest available implementation.

    On a CPU, few tokens and quantized activations are multiplied in fp32. Many tokens with float
    activations are multiplied in `product_dtype`, to which the dequantized weights are rounded.

    Shape:
        x: (T, columns) -> (T, rows), in its dtype
    """
    x = x.contiguous()
    if not (x.is_cpu or x.is_meta):
        return _multiply_on_device(x, matrix, rows, spec, bias)
    is_many = spec.activations == "float" and x.shape[0] > FEW_TOKENS
    dtype = product_dtype(x.dtype) if is_many else torch.float32
    wide, bias = x.to(dtype), None if bias is None else bias.to(dtype)
    kernels = load_kernels() if are_plain_cpu_tensors(wide, bias, *matrix) else None
    if is_many and kernels is not None:
        from bmforge.nn.panel_products import multiply_by_panels  # needs float activations

        out = multiply_by_panels(kernels, wide, matrix, rows, spec, bias)
    elif is_many:
        out = F.linear(wide, dequantize(matrix, rows, spec).to(dtype), bias)
    elif kernels is not None:
        out = kernels.multiply(wide, matrix, rows, spec, bias)
    else:
        out = multiply_plain(wide, matrix, rows, spec, bias)
    return out.to(x.dtype)


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a CPU multiplies many tokens of `dtype` by dequantized weights.

    This is bf16 if the dtype is bf16 and torch has a library for it, and otherwise fp32.
    """
    is_fast = dtype == torch.bfloat16 and not lacks_optimized_product(dtype)
    return torch.bfloat16 if is_fast else torch.float32


def can_quantize_groups_on_device(spec: QuantSpec, columns: int) -> bool:
    """Return True if accelerators can quantize the groups of a row of activations."""
    return spec.group_of(columns) <= _WIDEST_DEVICE_GROUP


def _multiply_on_device(
    x: Tensor, matrix: PackedMatrix, rows: int, spec: QuantSpec, bias: Tensor | None
) -> Tensor:
    """Return ``x @ matrix.T + bias`` on an accelerator.

    For up to 64 tokens, the results of the Triton kernels are bit-identical to those of a CPU. For
    more tokens, or without Triton, the weights are dequantized and the activations are not
    quantized, which is faster there and more accurate.

    Shape:
        x: (T, columns), contiguous -> (T, rows), in its dtype
    """
    kernels = load_triton(x.device)
    is_few = x.shape[0] <= FEW_DEVICE_TOKENS and spec.activations == "int8"
    is_narrow = can_quantize_groups_on_device(spec, x.shape[1])
    if kernels is not None and is_few and is_narrow and x.dtype != torch.float64:
        return kernels.multiply(x, matrix, rows, spec, bias)
    if kernels is None:
        weight = unpack_matrix(matrix, rows, spec).to(x.dtype)
    else:
        weight = kernels.dequantize(matrix, rows, spec, x.dtype)
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


def multiply_dense(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """Return ``x @ weight.T + bias`` for an unpacked weight on the CPU.

    Returns None if torch should compute the product.

    Small batches are computed by a kernel; a token's result is then bit-identical for every batch
    size. Torch reads 16-bit weights at little more than half the memory bandwidth, and for 2 to 16
    tokens in fp32 takes twice as long as the kernel on processors for which its library is not
    optimized. Large 16-bit batches are multiplied in fp32 if no library supports 16 bits.

    Shape:
        x: (..., columns) -> (..., rows), in the dtype of x
    """
    if torch.compiler.is_compiling():  # it cannot trace the calls below
        return None
    is_few = x.numel() <= FEW_TOKENS * weight.shape[1]
    if (
        torch.is_grad_enabled()
        or not x.numel()
        or not (is_few or lacks_optimized_product(weight.dtype))
    ):
        return None
    if not x.dim() or x.shape[-1] != weight.shape[1]:  # torch raises the error
        return None
    plain = type(x) is Tensor and type(weight) in (Tensor, torch.nn.Parameter)
    if not plain or x.dtype != weight.dtype or weight.dtype not in PLAIN_KINDS or is_tracing():
        return None
    if (
        not x.is_cpu
        or not are_plain_cpu_tensors(weight)
        or torch.is_autocast_enabled(x.device.type)
    ):
        return None
    tokens = x.reshape(-1, x.shape[-1]).float().contiguous()
    kernels = load_kernels() if is_few else None
    if kernels is not None:
        out = kernels.multiply_rows(tokens, weight)
        if bias is not None:
            out += bias
    elif lacks_optimized_product(weight.dtype):
        out = _multiply_widened(tokens, weight, bias)
    else:
        return None
    return out.view(*x.shape[:-1], weight.shape[0]).to(x.dtype)


@cache
def lacks_optimized_product(dtype: torch.dtype) -> bool:
    """Return True if torch has no optimized library for this 16-bit dtype on this CPU."""
    if dtype not in (torch.float16, torch.bfloat16):
        return False
    if not torch.backends.mkldnn.is_available():
        return True
    mkldnn = torch.ops.mkldnn
    supports = {
        torch.float16: mkldnn._is_mkldnn_fp16_supported,
        torch.bfloat16: mkldnn._is_mkldnn_bf16_supported,
    }
    return not supports[dtype]()


def _multiply_widened(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the fp32 product; the weight is converted to fp32 some rows at a time.

    Shape:
        x: (T, columns) fp32; weight: (rows, columns); returns (T, rows)
    """
    rows, columns = weight.shape
    out = torch.empty(x.shape[0], rows, dtype=weight.dtype)
    step = max(1, min(_PANEL_ROWS, _PANEL_NUMBERS // columns))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        of_rows = None if bias is None else bias[part].float()
        out[:, part] = F.linear(x, weight[part].float(), of_rows)
    return out


@cache
def _make_spec(
    bits: int, group: int, is_float: int, symmetric: bool, dtype: torch.dtype
) -> QuantSpec:
    scales: Any = "float32" if dtype == torch.float32 else "float16"
    return QuantSpec(bits, group, symmetric, "float" if is_float else "int8", scale_dtype=scales)


def decode_spec(numbers: list[int], matrix: PackedMatrix) -> QuantSpec:
    """Return the QuantSpec for integers from `encode_spec` and a matrix packed with that scheme."""
    bits, group, is_float = numbers
    return _make_spec(bits, group, is_float, matrix.minima is None, matrix.scales.dtype)


def encode_spec(spec: QuantSpec) -> list[int]:
    """Encode a QuantSpec as a list of integers for the custom operators.

    The list contains the bits, the group size, and 1 for float activations (0 for int8).
    """
    return [spec.bits, spec.group_size, int(spec.activations == "float")]


# Defined by hand, not as a `custom_op`, whose wrapper triples the overhead of a call.
_LIBRARY = torch.library.Library("bmforge", "FRAGMENT")
_TENSORS = "Tensor packed, Tensor scales, Tensor? minima, int rows, int[] spec"
_LIBRARY.define(f"multiply_packed(Tensor x, {_TENSORS}, Tensor? bias) -> Tensor")
_LIBRARY.define(f"multiply_stacked(Tensor x, {_TENSORS}, Tensor ends) -> Tensor")
_LIBRARY.define(f"dequantize({_TENSORS}) -> Tensor")


def _multiply_op(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    minima: Tensor | None,
    rows: int,
    spec: list[int],
    bias: Tensor | None,
) -> Tensor:
    matrix = PackedMatrix(packed, scales, minima)
    return multiply_packed(x, matrix, rows, decode_spec(spec, matrix), bias)


def _multiply_stacked_op(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    minima: Tensor | None,
    rows: int,
    spec: list[int],
    ends: Tensor,
) -> Tensor:
    """Multiply every group of rows by its own packed matrix, like `grouped_linear`."""
    out = x.new_empty(x.shape[0], rows)
    first = 0
    for number, last in enumerate(ends.tolist()):
        if last > first:
            minimum = None if minima is None else minima[number]
            product = _multiply_op(
                x[first:last], packed[number], scales[number], minimum, rows, spec, None
            )
            out[first:last] = product
        first = last
    return out


def _dequantize_op(
    packed: Tensor, scales: Tensor, minima: Tensor | None, rows: int, spec: list[int]
) -> Tensor:
    matrix = PackedMatrix(packed, scales, minima)
    return dequantize(matrix, rows, decode_spec(spec, matrix))


_LIBRARY.impl("multiply_packed", _multiply_op, "CompositeExplicitAutograd")
_LIBRARY.impl("multiply_stacked", _multiply_stacked_op, "CompositeExplicitAutograd")
_LIBRARY.impl("dequantize", _dequantize_op, "CompositeExplicitAutograd")


@torch.library.register_fake("bmforge::multiply_packed")
def _(x: Tensor, packed: Tensor, scales: Any, minima: Any, rows: int, spec: Any, bias: Any) -> Any:
    return x.new_empty(x.shape[0], rows)


@torch.library.register_fake("bmforge::multiply_stacked")
def _(x: Tensor, packed: Tensor, scales: Any, minima: Any, rows: int, spec: Any, ends: Any) -> Any:
    return x.new_empty(x.shape[0], rows)


@torch.library.register_fake("bmforge::dequantize")
def _(packed: Tensor, scales: Any, minima: Any, rows: int, spec: list[int]) -> Tensor:
    columns = packed.shape[1] * 32 // spec[0]
    return packed.new_empty(rows, columns, dtype=torch.float32)

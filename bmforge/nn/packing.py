"""Quantization of matrices, and the packed layout of their integers in memory and in files.

A matrix is split into panels of 16 rows. A panel is a sequence of blocks of 64 bytes, four bytes
per row. With 8 bits these are four adjacent columns; with 4 bits eight columns, the first four in
the low nibbles and the next four in the high nibbles. The same layout is used for every instruction
set and number of tokens, in memory, in files and for disk streaming. Scales and minima are ordered
by panel, group and row. Padding rows are zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from bmforge.errors import ConfigError, suggest

__all__ = [
    "dequantize_stack",
    "PANEL_ROWS",
    "PRESETS",
    "Integers",
    "PackedMatrix",
    "QuantSpec",
    "by_panels",
    "find_preset",
    "narrow_scales",
    "pack_matrix",
    "pack_values",
    "packed_shapes",
    "pick_rows",
    "quantize_groups",
    "unpack_matrix",
    "unpack_values",
]

PANEL_ROWS = 16
_BLOCK_BYTES = 64
# In longer groups the sum of the products could exceed int32.
_WIDEST_ROW = 1 << 17
# A group is a multiple of the columns in one step of the kernels.
_STEPS = {8: 4, 4: 32}
_SCALE_DTYPES = {"float16": torch.float16, "float32": torch.float32}
# Integer dtype and exponent bits, all of which are set in infinities and NaN only.
_EXPONENTS = {torch.float16: (torch.int16, 0x7C00), torch.float32: (torch.int32, 0x7F800000)}


@dataclass(frozen=True)
class QuantSpec:
    """Quantization scheme of a weight matrix and of the activations multiplied with it.

    Args:
        bits: bits per value, 8 or 4.
        group_size: number of columns of a row that share a scale; 0 means the whole row.
        symmetric: fix the zero point at 0; otherwise every group also has a minimum. With
            `scale_dtype` "float32" the minimum is minus an integer zero point times the scale, as
            in AWQ, GPTQ and compressed-tensors, and a weight of 0 stays exactly 0; with "float16"
            it is any number, as in GGUF's Q4_1.
        activations: "int8" quantizes the input of each token in groups of the same columns;
            "float" does not quantize it, which is more accurate and slower.
        outlier_ratio: fraction of the input columns that is stored in 16 bits: the columns with
            the largest quantization error.
        scale_dtype: dtype of scales and minima, "float16" or "float32".
    """

    bits: int = 8
    group_size: int = 32
    symmetric: bool = True
    activations: Literal["int8", "float"] = "int8"
    outlier_ratio: float = 0.0
    scale_dtype: Literal["float16", "float32"] = "float16"

    def __post_init__(self) -> None:
        """Raise `ConfigError` for an invalid field."""
        if self.bits not in _STEPS:
            raise ConfigError(f"bits={self.bits} must be 8 or 4.")
        step = 32 if self.bits == 4 else 16
        if self.group_size < 0 or self.group_size % step:
            raise ConfigError(
                f"group_size={self.group_size} is not supported with bits={self.bits} (allowed: a "
                f"multiple of {step}, or 0 for one scale per row)."
            )
        if self.activations not in ("int8", "float"):
            raise ConfigError(f'activations={self.activations!r} must be "int8" or "float".')
        if not 0 <= self.outlier_ratio < 1:
            raise ConfigError(
                f"outlier_ratio={self.outlier_ratio} must be at least 0 and below 1. The outlier "
                "ratio is the fraction of input columns that keep 16 bits."
            )
        if self.scale_dtype not in _SCALE_DTYPES:
            raise ConfigError(f'scale_dtype={self.scale_dtype!r} must be "float16" or "float32".')

    def group_of(self, columns: int) -> int:
        """Return the number of columns that share a scale in rows of `columns` columns."""
        return self.group_size or columns

    @property
    def scale_type(self) -> torch.dtype:
        """Dtype of scales and minima."""
        return _SCALE_DTYPES[self.scale_dtype]

    def fits(self, columns: int) -> bool:
        """Return True if rows of `columns` columns can be packed."""
        step = self.group_size or _STEPS[self.bits]
        return columns > 0 and columns % step == 0 and self.group_of(columns) <= _WIDEST_ROW

    def problem(self, columns: int) -> str:
        """Return the reason why rows of this width cannot be packed, or "" if they can.

        The reason names the supported widths.
        """
        step = self.group_size or _STEPS[self.bits]
        if self.fits(columns):
            return ""
        if columns % step == 0:
            return f"rows of {columns} columns are too long for one scale per row; set group_size"
        low, high = columns // step * step, -(-columns // step) * step
        near = f"{low} or {high}" if low else f"{high}"
        others = [repr(name) for name, other in PRESETS.items() if other.fits(columns)]
        hint = f"; this size is supported by {' and '.join(others)}" if others else ""
        return f"the input size {columns} is not a multiple of {step} (nearest: {near}){hint}"


PRESETS: Mapping[str, QuantSpec] = {
    "int8": QuantSpec(8, 32),
    "int8-dynamic": QuantSpec(8, 0, scale_dtype="float32"),
    "int4": QuantSpec(4, 32),
    "int4-128": QuantSpec(4, 128),
    "int4-asym": QuantSpec(4, 128, symmetric=False, scale_dtype="float32"),
}
"""Dict from scheme name to QuantSpec. "int8" and "int4" store the same values as GGUF's Q8_0 and
Q4_0; "int4-asym" is compressed-tensors' W4A16_ASYM."""


def find_preset(scheme: str | QuantSpec) -> QuantSpec:
    """Return the quantization scheme with the given preset name.

    Raises:
        ConfigError: the name is unknown.
    """
    if isinstance(scheme, QuantSpec):
        return scheme
    if scheme not in PRESETS:
        raise ConfigError(
            f"unknown quantization scheme {scheme!r} (supported: {', '.join(PRESETS)}, or a "
            f"QuantSpec).{suggest(scheme, PRESETS)}"
        )
    return PRESETS[scheme]


class PackedMatrix(NamedTuple):
    """Tensors of a packed matrix; a panel has 16 rows.

    Shape:
        packed: (panels, blocks, 64) uint8; scales and minima: (panels, groups, 16)
    """

    packed: Tensor
    scales: Tensor
    minima: Tensor | None


class Integers(NamedTuple):
    """Quantized matrix before packing; a group's weights are ``values * scales + minima``.

    Shape:
        values: (rows, columns) int8; scales and minima: (rows, groups)
    """

    values: Tensor
    scales: Tensor
    minima: Tensor | None


def packed_shapes(rows: int, columns: int, spec: QuantSpec) -> dict[str, tuple[int, int, int]]:
    """Return a dict from the name of each tensor of a packed matrix to its shape."""
    panels = -(-rows // PANEL_ROWS)
    scales = (panels, columns // spec.group_of(columns), PANEL_ROWS)
    packed = (panels, columns * spec.bits * PANEL_ROWS // 8 // _BLOCK_BYTES, _BLOCK_BYTES)
    return {"packed": packed, "scales": scales} | ({} if spec.symmetric else {"minima": scales})


def quantize_groups(matrix: Tensor, spec: QuantSpec, range_ratio: float = 1.0) -> Integers:
    """Quantize a matrix to integers, scales and minima.

    Symmetric groups are rounded like GGUF's Q8_0 and Q4_0. (4-bit integers have one more negative
    value, so the scale takes the sign of the largest value.) Asymmetric groups are rounded like
    GGUF's Q4_1 or, if scales are fp32, to integer zero points.

    Args:
        matrix: weights.
        spec: quantization scheme.
        range_ratio: fraction of each group's range that the integers cover; values outside are
            clipped.

    Shape:
        matrix: (rows, columns), any float dtype

    Raises:
        ConfigError: a value is not finite, or too large for the scales' dtype.

    Source: ggml's reference quantization, as implemented in `gguf.quants`.
    """
    rows, columns = matrix.shape
    groups = matrix.detach().float().view(rows, -1, spec.group_of(columns))
    minima: Tensor | None = None
    if spec.symmetric:
        values, scales = _quantize_symmetric(groups, spec.bits, range_ratio)
    elif spec.scale_dtype == "float32":
        values, scales, minima = _quantize_zero_points(groups, spec.bits, range_ratio)
    else:
        values, scales, minima = _quantize_minima(groups, spec.bits, range_ratio)
    stored = None if minima is None else narrow_scales(minima, spec)
    return Integers(values.view(rows, columns), narrow_scales(scales, spec), stored)


def narrow_scales(scales: Tensor, spec: QuantSpec) -> Tensor:
    """Convert scales or minima to the scheme's dtype.

    Raises:
        ConfigError: a value is not finite in that dtype.
    """
    narrowed = scales.to(spec.scale_type)
    if not _are_finite(narrowed):
        raise ConfigError(
            "a weight matrix contains values that are not finite or are too large for "
            f"{spec.scale_dtype} scales (maximum: {127 * torch.finfo(spec.scale_type).max:.0f}). "
            "Check the checkpoint, or use scale_dtype='float32'."
        )
    return narrowed


def _are_finite(values: Tensor) -> bool:
    """Return True if no fp16 or fp32 value is infinite or NaN.

    Torch's `isfinite` of fp16 takes ten times as long as these operations on integers.
    """
    kind, exponent = _EXPONENTS[values.dtype]
    return not bool(((values.view(kind) & exponent) == exponent).any())


def _quantize_symmetric(groups: Tensor, bits: int, ratio: float) -> tuple[Tensor, Tensor]:
    if bits == 8:
        scales = groups.abs().amax(-1) * ratio / 127
        scaled = groups * _inverse(scales)[..., None]
        size = scaled.abs()
        rounded = size.floor()
        rounded += ((size - rounded) * 2).floor_()  # halves are rounded away from zero
        return (rounded * scaled.sign()).clamp_(-127, 127).to(torch.int8), scales
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))[..., 0] * ratio
    scales = largest / -8
    scaled = groups.double() * _inverse(scales)[..., None].double() + 8.5
    return (scaled.trunc_().clamp_(0, 15) - 8).to(torch.int8), scales


def _quantize_minima(groups: Tensor, bits: int, ratio: float) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize groups asymmetrically, with float minima; return integers, scales and minima.

    4-bit values are 0 to 15. 8-bit values are stored as -128 to 127, so 128 scales are added to the
    minimum. `ratio` shrinks the range of every group.
    """
    low, high = groups.amin(-1) * ratio, groups.amax(-1) * ratio
    steps = (1 << bits) - 1
    scales = (high - low) / steps
    values = ((groups - low[..., None]) * _inverse(scales)[..., None] + 0.5).trunc_()
    values = values.clamp_(0, steps)
    if bits == 4:
        return values.to(torch.int8), scales, low
    return (values - 128).to(torch.int8), scales, low + 128 * scales


def _quantize_zero_points(groups: Tensor, bits: int, ratio: float) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize groups with integer zero points, so that 0 is exactly representable.

    Scales are rounded to 16 bits of mantissa, so that scale times zero point is exact in fp32.
    """
    low, high = groups.amin(-1).clamp(max=0) * ratio, groups.amax(-1).clamp(min=0) * ratio
    steps, middle = (1 << bits) - 1, 0 if bits == 4 else 128
    scales = _shorten_mantissa((high - low) / steps)
    inverse = _inverse(scales)
    zeros = (low * -inverse).round_().clamp_(0, steps)
    values = (groups * inverse[..., None]).round_().add_(zeros[..., None]).clamp_(0, steps)
    return (values - middle).to(torch.int8), scales, (middle - zeros) * scales


def _shorten_mantissa(values: Tensor) -> Tensor:
    """Round fp32 numbers to 16 bits of mantissa, including the leading bit."""
    return ((values.contiguous().view(torch.int32) + 0x80) & ~0xFF).view(torch.float32)


def _inverse(scales: Tensor) -> Tensor:
    """Return 1 / scales, or 0 for scales so small that the inverse would be infinite."""
    is_zero = scales.abs() < torch.finfo(torch.float32).tiny
    return torch.where(is_zero, 0.0, 1 / scales)


def pack_matrix(integers: Integers, spec: QuantSpec) -> PackedMatrix:
    """Return the packed form of a quantized matrix."""
    minima = None if integers.minima is None else by_panels(integers.minima)
    values = pack_values(integers.values, spec)
    return PackedMatrix(values, by_panels(integers.scales), minima)


def _pad_rows(matrix: Tensor) -> Tensor:
    return torch.nn.functional.pad(matrix, (0, 0, 0, -matrix.shape[0] % PANEL_ROWS))


def by_panels(scales: Tensor) -> Tensor:
    """Order scales (rows, G) by panel (block of 16 rows), group and row: (panels, G, 16)."""
    padded = _pad_rows(scales)
    return padded.view(-1, PANEL_ROWS, scales.shape[1]).transpose(1, 2).contiguous()


def pack_values(values: Tensor, spec: QuantSpec) -> Tensor:
    """Pack integers into bytes, in the layout that the module docstring describes.

    Shape:
        values: (rows, columns) int8; returns (panels, blocks, 64) uint8
    """
    columns = values.shape[1]
    # Four integers are moved as one int32, which is four times as fast as byte by byte.
    if spec.bits == 8:
        fours = _pad_rows(values).contiguous().view(torch.int32)
        parts = fours.view(-1, PANEL_ROWS, columns // 4).transpose(1, 2)
        return parts.contiguous().view(torch.uint8).view(-1, columns // 4, _BLOCK_BYTES)
    unsigned = (values + (8 if spec.symmetric else 0)).view(torch.uint8)
    fours = _pad_rows(unsigned).contiguous().view(torch.int32)
    parts = fours.view(-1, PANEL_ROWS, columns // 8, 2).transpose(1, 2)
    halves = parts[..., 0] | (parts[..., 1] << 4)  # every byte is below 16
    return halves.contiguous().view(torch.uint8).view(-1, columns // 8, _BLOCK_BYTES)


def unpack_values(packed: Tensor, spec: QuantSpec) -> Tensor:
    """Unpack the integers of all rows, including padding rows.

    Shape:
        packed: (panels, blocks, 64) uint8; returns (16 * panels, columns) int8
    """
    panels, blocks, _ = packed.shape
    parts = packed.view(panels, blocks, PANEL_ROWS, 4).transpose(1, 2)
    if spec.bits == 8:
        return parts.reshape(panels * PANEL_ROWS, -1).view(torch.int8)
    halves = torch.stack((parts & 15, parts >> 4), 3).view(torch.int8)
    return halves.view(panels * PANEL_ROWS, -1) - (8 if spec.symmetric else 0)


def _by_rows(scales: Tensor, group: int) -> Tensor:
    """Expand scales to one value per row and column, (16 * panels, columns), in fp32."""
    rows = scales.float().transpose(1, 2).reshape(-1, scales.shape[1])
    return rows.repeat_interleave(group, 1)


def unpack_matrix(matrix: PackedMatrix, rows: int, spec: QuantSpec) -> Tensor:
    """Dequantize a packed matrix to fp32.

    Shape:
        returns (rows, columns)
    """
    values = unpack_values(matrix.packed, spec)
    group = spec.group_of(values.shape[1])
    out = values.float() * _by_rows(matrix.scales, group)
    if matrix.minima is not None:
        out += _by_rows(matrix.minima, group)
    return out[:rows]


def pick_rows(matrix: PackedMatrix, index: Tensor, spec: QuantSpec) -> Tensor:
    """Dequantize the selected rows of a packed matrix to fp32.

    Shape:
        index: (...) integers; returns (..., columns)
    """
    panel, lane = index // PANEL_ROWS, index % PANEL_ROWS
    parts = matrix.packed.view(*matrix.packed.shape[:2], PANEL_ROWS, 4)[panel, :, lane]
    if spec.bits == 8:
        values = parts.flatten(-2).view(torch.int8)
    else:
        halves = torch.stack((parts & 15, parts >> 4), -2).view(torch.int8)
        values = halves.flatten(-3) - (8 if spec.symmetric else 0)
    group = spec.group_of(values.shape[-1])
    scales = matrix.scales[panel, :, lane].float().repeat_interleave(group, -1)
    out = values.float() * scales
    if matrix.minima is not None:
        out = out + matrix.minima[panel, :, lane].float().repeat_interleave(group, -1)
    return out


def dequantize_stack(
    packed: Tensor, scales: Tensor, minima: Tensor | None, rows: int, spec: list[int]
) -> Tensor:
    """Return a dequantized stack of matrices in fp32, (E, rows, columns)."""
    experts, panels = packed.shape[:2]
    flat = [None if t is None else t.flatten(0, 1) for t in (packed, scales, minima)]
    out = torch.ops.bmforge.dequantize(*flat, experts * panels * PANEL_ROWS, spec)
    return out.view(experts, panels * PANEL_ROWS, -1)[:, :rows]

"""Compiled kernels for products with packed weights: C++ in `kernels/`, called by ctypes."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from bmforge.native import load_kernels_of, processor_features, processor_field
from bmforge.nn.packing import PANEL_ROWS, PackedMatrix, QuantSpec, packed_shapes

__all__ = [
    "PLAIN_KINDS",
    "Kernels",
    "compile_sources",
    "compile_variant",
    "runnable_variants",
]

# Variant -> compiler flags and required CPU features, fastest first. All variants are compiled from
# the same source and give bit-identical results; the last one runs on every processor.
_VARIANTS: dict[str, tuple[str, frozenset[str]]] = {
    "avx512-vnni": (
        "-mavx512f -mavx512bw -mavx512vl -mavx512vnni -mfma",
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512_vnni", "fma"}),
    ),
    "avx2": ("-mavx2 -mf16c -mfma", frozenset({"avx2", "f16c", "fma"})),
    "plain": ("", frozenset()),
}
# AMD's family 25 (measured on Zen 4) prefetches in hardware; distant software prefetches slow it.
_AHEAD_BYTES = {("AuthenticAMD", "25"): 256}
_SOURCES = ("lanes.hpp", "products.cpp", "unpacking.cpp", "packing.cpp", "rows.cpp")
# As `Kind` of rows.cpp.
PLAIN_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Product(ctypes.Structure):
    """Mirrors the struct `Product` of products.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("packed", "scales", "minima", "bias")),
        *((name, ctypes.c_void_p) for name in ("x", "out", "room")),
        *((name, ctypes.c_int64) for name in ("tokens", "rows", "columns", "group")),
        *((name, ctypes.c_int32) for name in ("bits", "has_wide_scales", "threads")),
    ]


class _Part(ctypes.Structure):
    """Mirrors the struct `Part` of unpacking.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("panel", "last", "first", "end", "stride")),
        *((name, ctypes.c_int32) for name in ("is_half", "is_transposed")),
    ]


class _Rows(ctypes.Structure):
    """Mirrors the struct `Rows` of rows.cpp."""

    _fields_ = [
        ("weight", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "columns")),
        ("kind", ctypes.c_int32),
    ]


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class Kernels:
    """Compiled functions of one instruction-set variant.

    Args:
        library: compiled library.
        name: name of the variant.
    """

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self.name = name
        self._quantized, self._floats = library.multiply_quantized, library.multiply_floats
        self._unpack_part, self._room_bytes = library.unpack_part, library.room_bytes
        self._quantize_rows, self._pack = library.quantize_rows, library.pack_floats
        self._pack_integers = library.pack_integers
        self._rows, self._pick = library.multiply_rows, library.pick_rows
        # Without declarations ctypes takes results for 32-bit ints, which truncates a byte count.
        self._pick.restype = ctypes.c_bool
        self._room_bytes.restype = ctypes.c_int64
        self._room_bytes.argtypes = [ctypes.c_int64] * 3

    def multiply(
        self, x: Tensor, matrix: PackedMatrix, rows: int, spec: QuantSpec, bias: Tensor | None
    ) -> Tensor:
        """Return ``x @ matrix.T + bias``; all tensors contiguous on the CPU, x and bias in fp32.

        Shape:
            x: (T, columns) -> (T, rows)
        """
        tokens, columns = x.shape
        out = torch.empty(tokens, rows, dtype=torch.float32)
        if tokens == 0:
            return out
        product = _describe(matrix, rows, columns, spec, out)
        product.x, product.tokens, product.bias = x.data_ptr(), tokens, _address(bias)
        if spec.activations == "float":
            self._floats(ctypes.byref(product))
            return out
        size = self._room_bytes(tokens, columns, product.group)
        # Held by a local variable until the call returns; the kernel quantizes the activations into
        # it.
        room = torch.empty(size, dtype=torch.uint8)
        product.room = room.data_ptr()
        self._quantized(ctypes.byref(product))
        return out

    def multiply_rows(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return ``x @ weight.T`` for an unpacked fp32, bf16 or fp16 weight; sums are in fp32.

        A token's result is bit-identical for every number of tokens. Intended for few tokens.

        Shape:
            x: (T, columns) fp32; weight: (rows, columns); both contiguous; returns (T, rows) fp32
        """
        out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32)
        rows = _Rows(weight.data_ptr(), *weight.shape, PLAIN_KINDS[weight.dtype])
        self._rows(
            ctypes.byref(rows),
            ctypes.c_void_p(x.data_ptr()),
            ctypes.c_int64(x.shape[0]),
            ctypes.c_int(torch.get_num_threads()),
            ctypes.c_void_p(out.data_ptr()),
        )
        return out

    def unpack(self, matrix: PackedMatrix, rows: int, spec: QuantSpec) -> Tensor:
        """Dequantize a packed matrix to fp32, as `packing.unpack_matrix` does."""
        columns = matrix.packed.shape[1] * 32 // spec.bits
        out = torch.empty(rows, columns, dtype=torch.float32)
        self.unpack_part(matrix, slice(0, rows), slice(0, columns), spec, out)
        return out

    def unpack_part(
        self,
        matrix: PackedMatrix,
        rows: slice,
        columns: slice,
        spec: QuantSpec,
        out: Tensor,
        transposed: bool = False,
    ) -> None:
        """Dequantize some rows and columns of a packed matrix, rounded to the dtype of `out`.

        Args:
            matrix: packed matrix.
            rows: rows to dequantize, from a multiple of 16 on.
            columns: columns to dequantize, from a multiple of 32 to another one or to the end.
            spec: quantization scheme.
            out: memory for the result, fp32 or bf16, with a contiguous last dim.
            transposed: write columns instead of rows; rows up to a multiple of 16 are written.

        Shape:
            out: (rows, columns), transposed (columns, rows)
        """
        panels = rows.start // PANEL_ROWS, -(-rows.stop // PANEL_ROWS)
        width = matrix.packed.shape[1] * 32 // spec.bits
        part = _Part(*panels, columns.start, columns.stop, out.stride(0))
        part.is_half, part.is_transposed = out.dtype == torch.bfloat16, transposed
        product = _describe(matrix, rows.stop, width, spec, out)
        self._unpack_part(ctypes.byref(product), ctypes.byref(part))

    def pick(
        self, matrix: PackedMatrix, index: Tensor, rows: int, spec: QuantSpec
    ) -> Tensor | None:
        """Dequantize the selected rows to fp32; None if an index is out of range.

        Shape:
            index: (M,) int64, contiguous; returns (M, columns)
        """
        columns = matrix.packed.shape[1] * 32 // spec.bits
        out = torch.empty(index.numel(), columns, dtype=torch.float32)
        product, places = _describe(matrix, rows, columns, spec, out), index.data_ptr()
        index_arguments = ctypes.c_void_p(places), ctypes.c_int64(index.numel())
        return out if self._pick(ctypes.byref(product), *index_arguments) else None

    def pack(self, matrix: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
        """Quantize and pack an fp32 matrix; return `PackedMatrix.packed` and fp32 `scales`."""
        rows, columns = matrix.shape
        shapes = packed_shapes(rows, columns, spec)
        packed = torch.empty(shapes["packed"], dtype=torch.uint8)
        scales = torch.empty(shapes["scales"], dtype=torch.float32)
        sizes = [ctypes.c_int64(n) for n in (rows, columns, spec.group_of(columns))]
        self._pack(
            ctypes.c_void_p(matrix.data_ptr()),
            *sizes,
            ctypes.c_int(spec.bits),
            ctypes.c_int(torch.get_num_threads()),
            ctypes.c_void_p(packed.data_ptr()),
            ctypes.c_void_p(scales.data_ptr()),
        )
        return packed, scales

    def pack_integers(self, values: Tensor, spec: QuantSpec, packed: Tensor) -> None:
        """Pack integers as `packing.pack_values` does; groups need not be adjacent in memory.

        Args:
            values: integers in int8, with a contiguous last dim.
            spec: quantization scheme.
            packed: output, contiguous.

        Shape:
            values: (rows, G, W); packed: (panels, blocks, 64)
        """
        # Symmetric 4-bit integers, -8 to 7, are stored as nibbles 0 to 15.
        shift = 8 if spec.bits == 4 and spec.symmetric else 0
        sizes = [ctypes.c_int64(n) for n in (*values.shape, *values.stride()[:2])]
        options = [ctypes.c_int(n) for n in (spec.bits, shift, torch.get_num_threads())]
        places = [ctypes.c_void_p(t.data_ptr()) for t in (values, packed)]
        self._pack_integers(places[0], *sizes, *options, places[1])

    def quantize(self, x: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the integers, scales and group sums of activations; see `quantize_activations`."""
        tokens, columns = x.shape
        values = torch.empty(tokens, columns, dtype=torch.int8)
        scales = torch.empty(tokens, columns // group, dtype=torch.float32)
        sums = torch.empty(tokens, columns // group, dtype=torch.int32)
        sizes = [ctypes.c_int64(size) for size in (tokens, columns, group)]
        places = [ctypes.c_void_p(t.data_ptr()) for t in (values, scales, sums)]
        self._quantize_rows(ctypes.c_void_p(x.data_ptr()), *sizes, *places)
        return values, scales, sums


def _describe(
    matrix: PackedMatrix, rows: int, columns: int, spec: QuantSpec, out: Tensor
) -> _Product:
    return _Product(
        packed=matrix.packed.data_ptr(),
        scales=matrix.scales.data_ptr(),
        minima=_address(matrix.minima),
        out=out.data_ptr(),
        rows=rows,
        columns=columns,
        group=spec.group_of(columns),
        bits=spec.bits,
        has_wide_scales=matrix.scales.dtype == torch.float32,
        threads=torch.get_num_threads(),
    )


def runnable_variants() -> list[str]:
    """Return the kernel variants that this processor supports, fastest first."""
    features = processor_features()
    return [name for name, (_, needs) in _VARIANTS.items() if needs <= features]


def compile_sources(title: str, variant: str, more: tuple[str, ...] = ()) -> ctypes.CDLL | None:
    """Compile the matrix-product kernels, and `more` sources, for the instruction set `variant`."""
    # One translation unit for all sources: `load_kernels_of` compiles and caches a library per
    # variant.
    folder, parts = Path(__file__).with_name("kernels"), (*_SOURCES, *more)
    flags = " ".join([_VARIANTS[variant][0], *_measured_flags(), *_rounding_flags(variant)])
    return load_kernels_of(f"{title}-{variant}", folder, parts, flags)


def _measured_flags() -> list[str]:
    """Return compiler flags with the measured best settings for this processor, if any."""
    ahead = _AHEAD_BYTES.get((processor_field("vendor_id"), processor_field("cpu family")))
    return [f"-DAHEAD_BYTES={ahead}"] if ahead else []


def _rounding_flags(variant: str) -> list[str]:
    """Return the flag for this processor's instruction that rounds to bf16, if it has one.

    Without it, rounding takes a third of the time of dequantizing weights to bf16.
    """
    has_it = variant.startswith("avx512") and "avx512_bf16" in processor_features()
    return ["-mavx512bf16"] if has_it else []


def compile_variant(name: str) -> Kernels | None:
    """Return the kernels of one variant, compiled if necessary; None if they do not compile."""
    library = compile_sources("products", name)
    return None if library is None else Kernels(library, name)

"""Reads experts in MXFP4, the 4-bit floats of the published gpt-oss checkpoints.

A stack of matrices X of shape (E, in, out) is stored as two tensors. ``X_blocks`` (E, out, in / 32,
16) contains two numbers per byte, the first in the low bits. ``X_scales`` (E, out, in / 32)
contains the exponent of each block of 32 numbers, plus 127. A number has a sign bit, 2 bits of
exponent and 1 bit of mantissa.

Source: Open Compute Project, "OCP Microscaling Formats (MX) Specification" 1.0, section 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bmforge.errors import CheckpointError
from bmforge.models.formats.packed_config import leave_out_packing, read_raw_config
from bmforge.models.formats.safe_file import TensorFile, read_slice

__all__ = ["Mxfp4Stacks", "find_mxfp4", "without_mxfp4"]

_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK_SIZE = 32
_BIAS = 127
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_POSITIVE, *(-value for value in _POSITIVE)])


def without_mxfp4(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json without the `quantization_config` of MXFP4."""
    return leave_out_packing(raw, lambda raw: _names_mxfp4(raw) or None)


def find_mxfp4(directory: Path) -> bool:
    """Return True if a directory's config.json declares MXFP4 quantization."""
    return _names_mxfp4(read_raw_config(directory))


def _names_mxfp4(raw: Mapping[str, Any]) -> bool:
    quantization = raw.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"


class Mxfp4Stacks:
    """MXFP4 tensors of a checkpoint, converted exactly to bf16; implements `TensorFile`.

    Args:
        files: mapping from tensor name to the file with the tensor.

    Raises:
        CheckpointError: a tensor has no scales, or scales of a different shape.
    """

    def __init__(self, files: Mapping[str, TensorFile]) -> None:
        self.files = files
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.parts: set[str] = set()
        for blocks in files:
            if not blocks.endswith(_BLOCKS):
                continue
            name = blocks.removesuffix(_BLOCKS)
            scales = name + _SCALES
            shape = tuple(files[blocks].shapes[blocks])
            expected = shape[:3]
            scales_shape = tuple(files[scales].shapes[scales]) if scales in files else None
            if len(shape) != 4 or shape[3] * 2 != _BLOCK_SIZE or scales_shape != expected:
                raise CheckpointError(
                    f"the MXFP4 tensors of {name} have unsupported shapes: {blocks} has {shape}, "
                    f"and {scales} has {scales_shape} (expected: (E, rows, n, 16) and (E, rows, "
                    "n)). Download the checkpoint again."
                )
            self.shapes[name] = (shape[0], shape[2] * _BLOCK_SIZE, shape[1])
            self.parts |= {blocks, scales}

    def dtype(self, name: str) -> torch.dtype:
        """Return bf16, which represents every value exactly."""
        return torch.bfloat16

    def fill(self, name: str, slices: tuple[slice, ...], target: Tensor) -> None:
        """Dequantize a slice into `target`, a contiguous bf16 CPU tensor of the same shape."""
        experts, columns, rows = slices
        first, last = columns.start // _BLOCK_SIZE, -(-columns.stop // _BLOCK_SIZE)
        box = experts, rows, slice(first, last)
        blocks = self._read(name + _BLOCKS, (*box, slice(0, _BLOCK_SIZE // 2)))
        scales = self._read(name + _SCALES, box)
        numbers = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
        exponents = scales.to(torch.int32) - _BIAS
        values = torch.ldexp(_VALUES[numbers.int()], exponents[..., None]).flatten(-2)
        start = columns.start - first * _BLOCK_SIZE
        target.copy_(values[..., start : start + columns.stop - columns.start].transpose(1, 2))

    def _read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        return read_slice(self.files[name], name, slices)

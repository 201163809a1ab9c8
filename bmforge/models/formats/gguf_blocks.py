"""Decodes the blocks of a GGUF file to integers, scales and minima, or to floats.

Every quantized type is decoded to the same form: groups of adjacent integers q with one scale and,
for some types, one minimum; values are ``scale * q + minimum`` in fp32. The types differ in group
width and bit layout.

Source: the block layouts of ggml-org/ggml (``ggml-common.h``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from bmforge.errors import MissingDependencyError
from bmforge.gguf_header import BLOCKS
from bmforge.nn.packing import QuantSpec

__all__ = ["FLOAT_KINDS", "SPECS", "QuantizedGroups", "read_values", "unpack_blocks"]

FLOAT_KINDS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# GGUF type -> QuantSpec with the same integers, scales and minima. Integers of 5 and 6 bits are
# stored in 8 bits, and scales that are products (of the K types) in fp32.
SPECS = {
    "Q4_0": QuantSpec(4, 32),
    "Q4_1": QuantSpec(4, 32, symmetric=False),
    "Q5_0": QuantSpec(8, 32),
    "Q5_1": QuantSpec(8, 32, symmetric=False),
    "Q8_0": QuantSpec(8, 32),
    "Q4_K": QuantSpec(4, 32, symmetric=False, scale_dtype="float32"),
    "Q5_K": QuantSpec(8, 32, symmetric=False, scale_dtype="float32"),
    "Q6_K": QuantSpec(8, 16, scale_dtype="float32"),
}


class QuantizedGroups(NamedTuple):
    """Quantized values of some rows.

    Shape:
        integers: (R, G, W) in int8: R rows of G groups of W adjacent integers, possibly with
            gaps between the groups; scales: (R, G) in fp32, or fp16 if that is exact; minima:
            (R, G) in fp32, or None if they are 0
    """

    integers: Tensor
    scales: Tensor
    minima: Tensor | None

    def values(self) -> Tensor:
        """Return the dequantized values as an fp32 tensor (R, G * W)."""
        out = self.integers.float().mul_(self.scales[..., None])
        if self.minima is not None:
            out.add_(self.minima[..., None])
        return out.flatten(1)


def read_values(kind: str, rows: Tensor) -> Tensor:
    """Decode rows of stored bytes to floats.

    Args:
        kind: a key of `gguf_header.BLOCKS`.
        rows: (R, bytes) in uint8.

    Shape:
        returns (R, values), in fp32 for quantized types
    """
    if kind in FLOAT_KINDS:
        return rows.view(FLOAT_KINDS[kind])
    if kind not in _UNPACK:
        return _dequantize(kind, rows)
    return unpack_blocks(kind, rows).values()


def _dequantize(kind: str, rows: Tensor) -> Tensor:
    """Decode a type that no packed layer supports, with the package `gguf`.

    Raises:
        MissingDependencyError: the package `gguf` is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise MissingDependencyError("gguf", "gguf", f"reading {kind} tensors") from error
    values = gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(values).view(len(rows), -1).float()


def unpack_blocks(kind: str, rows: Tensor) -> QuantizedGroups:
    """Decode rows of blocks to integers, scales and minima.

    Args:
        kind: quantized type, a key of `gguf_header.BLOCKS`.
        rows: (R, bytes) in uint8.
    """
    count = rows.shape[0]
    blocks = rows.reshape(-1, BLOCKS[kind][1])
    integers, scales, minima = _UNPACK[kind](blocks)
    # From blocks to rows of groups: scales of (blocks, groups in a block).
    scales = scales.reshape(count, -1)
    integers = integers.reshape(count, scales.shape[1], -1)
    return QuantizedGroups(integers, scales, None if minima is None else minima.reshape(count, -1))


_Unpacked = tuple[Tensor, Tensor, Tensor | None]


def _half(blocks: Tensor, first: int) -> Tensor:
    """Return (blocks, 1) in fp32: the fp16 number at byte `first` of every block."""
    return blocks[:, first : first + 2].contiguous().view(torch.float16).float()


def _nibbles(data: Tensor) -> Tensor:
    """Return all low nibbles of the bytes, then all high nibbles, along the last dim."""
    return torch.cat((data & 15, data >> 4), -1)


def _bits(data: Tensor) -> Tensor:
    """Expand 4 bytes to the fifth bits of 32 integers, lowest bit first."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((data[..., None] >> shifts & 1) << 4).flatten(1)


def _q4_0(blocks: Tensor) -> _Unpacked:
    return _nibbles(blocks[:, 2:]).view(torch.int8) - 8, _half(blocks, 0), None


def _q4_1(blocks: Tensor) -> _Unpacked:
    return _nibbles(blocks[:, 4:]).view(torch.int8), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Tensor) -> _Unpacked:
    integers = _nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6])
    return integers.view(torch.int8) - 16, _half(blocks, 0), None


def _q5_1(blocks: Tensor) -> _Unpacked:
    integers = _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8])
    return integers.view(torch.int8), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Tensor) -> _Unpacked:
    return blocks[:, 2:].view(torch.int8), blocks[:, :2].view(torch.float16), None


def _factors(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 8 scales and 8 negated minima of each block of 256 values, each (blocks, 8).

    Both are 6-bit integers times the block's two fp16 numbers. The bits of the first four integers
    are contiguous, in bytes 0 to 3 (scales) and 4 to 7 (minima). The lower four bits of the last
    four are in bytes 8 to 11, and their upper two bits are in the upper bits of bytes 0 to 7.
    """
    a, b, c = blocks[:, 4:16].view(-1, 3, 4).unbind(1)
    scales = torch.cat((a & 63, c & 15 | a >> 2 & 48), 1)
    minima = torch.cat((b & 63, c >> 4 | b >> 2 & 48), 1)
    return _half(blocks, 0) * scales.float(), -(_half(blocks, 2) * minima.float())


def _q4_k(blocks: Tensor) -> _Unpacked:
    # Four runs of 32 bytes contain two groups each, in their lower and upper nibbles.
    return _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).view(torch.int8), *_factors(blocks)


def _q5_k(blocks: Tensor) -> _Unpacked:
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = (blocks[:, 16:48].unsqueeze(1) >> shifts & 1) << 4  # group g has bit g of every byte
    integers = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32) | fifth
    return integers.view(torch.int8), *_factors(blocks)


def _q6_k(blocks: Tensor) -> _Unpacked:
    # Two halves of 128 values: 64 bytes with the lower 4 bits, 32 bytes with the upper 2 bits.
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64))
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3).flatten(2) << 4
    factors = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return (low | high).view(torch.int8) - 32, _half(blocks, 208) * factors, None


_UNPACK: dict[str, Callable[[Tensor], _Unpacked]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}

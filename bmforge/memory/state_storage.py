"""Storage of optimizer states between steps, on the host or disk, as fp32, bf16 or 8 bits.

A `StateStorage` stores one flat tensor and returns ranges of it in fp32. For fp32 in host memory a
range is a view, so no data is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from bmforge.memory.spill import Bytes, HostBytes, SpillFile

__all__ = ["BLOCK_ELEMENTS", "StateStorage", "StateDtype", "storage_bytes"]

StateDtype = Literal["fp32", "bf16", "8bit"]
# Ranges begin at multiples of this number of elements: it is the block size of 8-bit scales, and
# vectorized kernels then divide ranges into the same vectors as the whole tensor.
BLOCK_ELEMENTS = 256


def storage_bytes(numel: int, kind: StateDtype, dtype: torch.dtype = torch.float32) -> int:
    """Return the number of bytes that `numel` elements need in the storage format `kind`."""
    if kind == "8bit":
        return (BLOCK_ELEMENTS + 4) * -(-numel // BLOCK_ELEMENTS)
    return numel * (2 if kind == "bf16" else dtype.itemsize)


class StateStorage:
    """Stores one flat tensor, initially zero, in host memory or on disk.

    Args:
        numel: number of elements.
        kind: storage format: "fp32" (values in `dtype`, not quantized), "bf16", or "8bit" (codes
            of 8 bits, with one scale per block).
        dtype: dtype of the values that are stored or returned.
        disk: file in which the tensor is stored; None means host memory.
        signed: whether 8-bit values may be negative.
        new_host: function that allocates host memory, possibly page-locked.
    """

    def __init__(
        self,
        numel: int,
        kind: StateDtype = "fp32",
        *,
        dtype: torch.dtype = torch.float32,
        disk: SpillFile | None = None,
        signed: bool = True,
        new_host: Callable[[int], Tensor] | None = None,
    ) -> None:
        self.numel, self.dtype, self.is_on_disk = numel, dtype, disk is not None
        self._kind, self._signed = kind, signed
        size = storage_bytes(numel, kind, dtype)
        if disk is not None:
            self._bytes: Bytes = disk.reserve(size)
        else:
            make = new_host or (lambda count: torch.empty(count, dtype=torch.uint8))
            self._bytes = HostBytes(make(size))
        self.clear()

    def clear(self) -> None:
        """Set all elements to zero."""
        # In parts, because zeros of the whole size would double the memory.
        part = 1 << 20
        for start in range(0, self.numel, part):
            self.put(start, torch.zeros(min(part, self.numel - start), dtype=self.dtype))

    def fetch(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the elements from `start`, which is a multiple of `BLOCK_ELEMENTS`, to `stop`."""
        stop = self.numel if stop is None else stop
        if self._kind == "8bit":
            codes = self._bytes.read(start, stop)
            scales = self._bytes.read(*self._scale_range(start, stop)).view(torch.float32)
            return _dequantize(codes, scales, self._signed).to(self.dtype)
        width = storage_bytes(1, self._kind, self.dtype)
        stored = self._bytes.read(start * width, stop * width)
        return stored.view(torch.bfloat16).to(self.dtype) if width == 2 else stored.view(self.dtype)

    def fill(self, target: Tensor) -> None:
        """Copy all elements into a contiguous host tensor, one range at a time."""
        flat, part = target.view(-1), 1 << 20
        for start in range(0, self.numel, part):
            stop = min(start + part, self.numel)
            flat[start:stop].copy_(self.fetch(start, stop))

    def put(self, start: int, values: Tensor) -> None:
        """Store `values` beginning at element `start`, which is a multiple of `BLOCK_ELEMENTS`."""
        values = values.detach().reshape(-1)
        if self._kind == "8bit":
            codes, scales = _quantize(values.float(), self._signed)
            first, _ = self._scale_range(start, start + values.numel())
            self._bytes.write(start, codes)
            self._bytes.write(first, scales.view(torch.uint8))
            return
        stored = values.to(torch.bfloat16 if self._kind == "bf16" else self.dtype)
        self._bytes.write(start * stored.element_size(), stored.contiguous().view(torch.uint8))

    def _scale_range(self, start: int, stop: int) -> tuple[int, int]:
        """Return the byte range with the scales of a range of elements, stored after all codes."""
        codes = -(-self.numel // BLOCK_ELEMENTS) * BLOCK_ELEMENTS
        return codes + 4 * (start // BLOCK_ELEMENTS), codes + 4 * -(-stop // BLOCK_ELEMENTS)


@cache
def _levels(signed: bool) -> tuple[Tensor, Tensor]:
    """Return the 256 code values, ascending in [-1, 1] or [0, 1], and the bounds between them.

    The codes span seven decades and are denser for larger values: small values keep only their
    order of magnitude, large values two significant digits.

    Source: dynamic tree quantization, Dettmers et al. 2022, "8-bit Optimizers via Block-wise
        Quantization".
    """
    magnitudes: list[float] = []
    for decade in range(7):
        edges = torch.linspace(0.1, 1.0, 2 ** (decade + (0 if signed else 1)) + 1).double()
        magnitudes += ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)).tolist()
    values = [0.0, *magnitudes, 1.0]
    if signed:  # keep -1 and 1, so that quantization is idempotent; drop one level
        values += [-1.0, *(-m for m in magnitudes[1:])]
    levels = torch.tensor(sorted(values), dtype=torch.float64).float()
    return levels, (levels[1:] + levels[:-1]) / 2


def _quantize(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the code of every value, and the largest magnitude in every block."""
    blocks = -(-values.numel() // BLOCK_ELEMENTS)
    padded = values.new_zeros(blocks * BLOCK_ELEMENTS)
    padded[: values.numel()] = values
    rows = padded.view(blocks, BLOCK_ELEMENTS)
    scales = rows.abs().amax(1)
    # A block of zeros has scale 0, and 0 / 0 would be NaN.
    unit = rows / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    _, bounds = _levels(signed)
    # The bounds are halfway between the levels, so the nearest level is chosen.
    codes = torch.bucketize(unit, bounds)
    if not signed:
        # A nonzero second moment must not round to 0, because updates are divided by its root.
        codes = torch.where(rows > 0, codes.clamp(min=1), codes)
    return codes.to(torch.uint8).view(-1)[: values.numel()], scales


def _dequantize(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    levels, _ = _levels(signed)
    per_value = scales.repeat_interleave(BLOCK_ELEMENTS)[: codes.numel()]
    return levels[codes.long()] * per_value

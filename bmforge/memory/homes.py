"""Where an optimizer's state lives between steps: in which memory, and in how many bits.

A `Home` keeps one flat tensor as fp32, bf16 or 8-bit, in host memory or on disk, and hands parts of
it out as fp32. In host memory and fp32 a part is the memory itself, so nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from bmforge.memory.spill import Bytes, HostBytes, SpillFile

__all__ = ["BLOCK_ELEMENTS", "Home", "StateDtype", "home_bytes"]

StateDtype = Literal["fp32", "bf16", "8bit"]
# Parts begin at multiples of this: 8-bit values share a scale by so many, and a kernel that works
# on whole vectors of any width sees the same vectors as in one piece.
BLOCK_ELEMENTS = 256


def home_bytes(numel: int, kind: StateDtype, dtype: torch.dtype = torch.float32) -> int:
    """Return how many bytes a home of `numel` elements takes."""
    if kind == "8bit":
        return (BLOCK_ELEMENTS + 4) * -(-numel // BLOCK_ELEMENTS)
    return numel * (2 if kind == "bf16" else dtype.itemsize)


class Home:
    """One flat tensor outside the device; it begins as zeros.

    Args:
        numel: its length.
        kind: how it is kept.
        dtype: of the values handed out; kept as is by "fp32".
        disk: the file to keep it in; None keeps it in host memory.
        signed: 8-bit only: values may be negative.
        new_host: makes host memory, for which pages may be locked.
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
        size = home_bytes(numel, kind, dtype)
        if disk is not None:
            self._bytes: Bytes = disk.reserve(size)
        else:
            make = new_host or (lambda count: torch.empty(count, dtype=torch.uint8))
            self._bytes = HostBytes(make(size))
        self.clear()

    def clear(self) -> None:
        """Make it zeros."""
        part = 1 << 20
        for start in range(0, self.numel, part):
            self.put(start, torch.zeros(min(part, self.numel - start), dtype=self.dtype))

    def fetch(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return elements from `start`, a multiple of `BLOCK_ELEMENTS`, to `stop`."""
        stop = self.numel if stop is None else stop
        if self._kind == "8bit":
            codes = self._bytes.read(start, stop)
            scales = self._bytes.read(*self._scale_range(start, stop)).view(torch.float32)
            return _dequantize(codes, scales, self._signed).to(self.dtype)
        width = home_bytes(1, self._kind, self.dtype)
        kept = self._bytes.read(start * width, stop * width)
        return kept.view(torch.bfloat16).to(self.dtype) if width == 2 else kept.view(self.dtype)

    def fill(self, target: Tensor) -> None:
        """Copy all of it into a contiguous host tensor, part by part."""
        flat, part = target.view(-1), 1 << 20
        for start in range(0, self.numel, part):
            stop = min(start + part, self.numel)
            flat[start:stop].copy_(self.fetch(start, stop))

    def put(self, start: int, values: Tensor) -> None:
        """Keep `values` from element `start`, a multiple of `BLOCK_ELEMENTS`, on."""
        values = values.detach().reshape(-1)
        if self._kind == "8bit":
            codes, scales = _quantize(values.float(), self._signed)
            first, _ = self._scale_range(start, start + values.numel())
            self._bytes.write(start, codes)
            self._bytes.write(first, scales.view(torch.uint8))
            return
        kept = values.to(torch.bfloat16 if self._kind == "bf16" else self.dtype)
        self._bytes.write(start * kept.element_size(), kept.contiguous().view(torch.uint8))

    def _scale_range(self, start: int, stop: int) -> tuple[int, int]:
        """Return where the scales of elements begin and end; they lie behind the codes."""
        codes = -(-self.numel // BLOCK_ELEMENTS) * BLOCK_ELEMENTS
        return codes + 4 * (start // BLOCK_ELEMENTS), codes + 4 * -(-stop // BLOCK_ELEMENTS)


@cache
def _levels(signed: bool) -> tuple[Tensor, Tensor]:
    """Return the 256 values of a code, ascending in [-1, 1] or [0, 1], and the bounds between them.

    Seven decades, each divided as finely as bits are left: small values keep their order of
    magnitude, large ones two digits.

    Source: dynamic tree quantization, Dettmers et al. 2022, "8-bit Optimizers via Block-wise
        Quantization".
    """
    magnitudes: list[float] = []
    for decade in range(7):
        edges = torch.linspace(0.1, 1.0, 2 ** (decade + (0 if signed else 1)) + 1).double()
        magnitudes += ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)).tolist()
    values = [0.0, *magnitudes, 1.0]
    if signed:  # both ends are there, so that quantizing twice changes nothing; one level gives way
        values += [-1.0, *(-m for m in magnitudes[1:])]
    levels = torch.tensor(sorted(values), dtype=torch.float64).float()
    return levels, (levels[1:] + levels[:-1]) / 2


def _quantize(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Return a code for every value and the largest magnitude of every block."""
    blocks = -(-values.numel() // BLOCK_ELEMENTS)
    padded = values.new_zeros(blocks * BLOCK_ELEMENTS)
    padded[: values.numel()] = values
    rows = padded.view(blocks, BLOCK_ELEMENTS)
    scales = rows.abs().amax(1)
    unit = rows / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    _, bounds = _levels(signed)
    codes = torch.bucketize(unit, bounds)
    if not signed:
        # A second moment that is not zero must not become it: steps are divided by its root.
        codes = torch.where(rows > 0, codes.clamp(min=1), codes)
    return codes.to(torch.uint8).view(-1)[: values.numel()], scales


def _dequantize(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    levels, _ = _levels(signed)
    per_value = scales.repeat_interleave(BLOCK_ELEMENTS)[: codes.numel()]
    return levels[codes.long()] * per_value

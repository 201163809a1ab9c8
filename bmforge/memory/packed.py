"""Packs a block's tensors into one byte buffer, and manages device buffers of streamed blocks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from bmforge.device import is_host
from bmforge.memory.copies import CopyEngine, CopyHandle

__all__ = ["PackedBlock", "Slot", "replace_with_stub_", "packed_bytes"]

# A view of a wider dtype needs an aligned offset; 64 bytes are also a cache line.
_ALIGN_BYTES = 64


def packed_bytes(tensor: Tensor) -> int:
    """Return the size of a tensor in a `Slot` in bytes, rounded up to the alignment."""
    return -(-tensor.numel() * tensor.element_size() // _ALIGN_BYTES) * _ALIGN_BYTES


class PackedBlock:
    """Streamed tensors of one block and their offsets in a device buffer (`Slot`).

    Args:
        prefix: name of the block.
        module: the block.
        parameters: mapping from full name to streamed tensor.
        device: compute device.
        is_on_host: whether the bytes are cached in host memory after the first read.

    Attributes:
        kept: the block's bytes cached in host memory, or None.
    """

    def __init__(
        self,
        prefix: str,
        module: nn.Module,
        parameters: dict[str, Tensor],
        device: torch.device,
        is_on_host: bool = False,
    ) -> None:
        self.prefix, self.module, self.parameters = prefix, module, parameters
        self.is_on_host = is_on_host
        self.kept: Tensor | None = None
        # Stubs are made once, because blocks are hidden in every pass.
        self._stubs = {name: _make_stub(p, device) for name, p in parameters.items()}
        self.places: dict[str, tuple[int, int]] = {}
        self.size_bytes = 0
        for name, parameter in parameters.items():
            size = parameter.numel() * parameter.element_size()
            self.places[name] = self.size_bytes, self.size_bytes + size
            self.size_bytes += packed_bytes(parameter)

    def views(self, memory: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of each tensor and a view of its values in a `Slot`'s memory."""
        for name, (start, stop) in self.places.items():
            parameter = self.parameters[name]
            yield name, memory[start:stop].view(parameter.dtype).view(parameter.shape)

    def show(self, memory: Tensor) -> None:
        """Make the block's parameters views of a `Slot`'s memory."""
        for name, view in self.views(memory):
            # `.data` keeps the identity of the parameter, which optimizers, hooks and autograd
            # refer to.
            self.parameters[name].data = view

    def hide(self) -> None:
        """Replace the block's parameters with NaN stubs, so that accidental use is noticed."""
        for name, parameter in self.parameters.items():
            parameter.data = self._stubs[name]


def _make_stub(parameter: Tensor, device: torch.device) -> Tensor:
    """Return a NaN tensor with the same shape that needs almost no memory.

    Integer tensors are filled with 0: they hold packed weights, whose scales are NaN.
    """
    value = float("nan") if parameter.is_floating_point() else 0
    stub = torch.full((), value, dtype=parameter.dtype, device=device)
    return stub.expand(parameter.shape)


class Slot:
    """Device buffer that holds one block at a time, with a staging buffer on the host.

    Args:
        size_bytes: size of the largest block.
        device: compute device.
        engine: copy engine.
    """

    def __init__(self, size_bytes: int, device: torch.device, engine: CopyEngine) -> None:
        # Files cannot be read into device memory, so each slot has a host buffer of its own; with a
        # shared one, a read would wait for the copy of the other slot.
        self.host = engine.new_host((size_bytes,), torch.uint8)
        self.memory = self.host
        if not is_host(device):
            self.memory = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self.block: int | None = None
        self.is_shown = False
        self.ticket: CopyHandle | None = None
        self.copied: CopyHandle | None = None


def replace_with_stub_(
    module: nn.Module, name: str, parameter: Tensor, device: torch.device
) -> None:
    """Replace a meta tensor with a stub on `device` that needs no memory."""
    if not parameter.is_meta:
        return
    owner, _, leaf = name.rpartition(".")
    described = torch.empty((), dtype=parameter.dtype, device=device).expand(parameter.shape)
    if isinstance(parameter, nn.Parameter):
        described = nn.Parameter(described, requires_grad=parameter.requires_grad)
    setattr(module.get_submodule(owner), leaf, described)

"""One block's tensors as one run of bytes, and the slots in which such runs arrive."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from bmforge.device import is_host
from bmforge.memory.copies import CopyEngine, Ticket

__all__ = ["PackedBlock", "Slot", "give_device_", "packed_bytes"]

_ALIGN_BYTES = 64


def packed_bytes(tensor: Tensor) -> int:
    """Return what a tensor takes of a slot."""
    return -(-tensor.numel() * tensor.element_size() // _ALIGN_BYTES) * _ALIGN_BYTES


class PackedBlock:
    """One block's tensors that come and go, and where each lies in a slot.

    Args:
        prefix: the block's name.
        module: it.
        parameters: by their whole names.
        device: where they are used.
        is_on_host: their bytes wait in host memory once they have been read.

    Attributes:
        kept: these bytes, where they are.
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
        self._stubs = {name: _make_stub(p, device) for name, p in parameters.items()}
        self.places: dict[str, tuple[int, int]] = {}
        self.size_bytes = 0
        for name, parameter in parameters.items():
            size = parameter.numel() * parameter.element_size()
            self.places[name] = self.size_bytes, self.size_bytes + size
            self.size_bytes += packed_bytes(parameter)

    def views(self, memory: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors' names and views in a slot's memory."""
        for name, (start, stop) in self.places.items():
            parameter = self.parameters[name]
            yield name, memory[start:stop].view(parameter.dtype).view(parameter.shape)

    def show(self, memory: Tensor) -> None:
        """Let the block compute with what is in a slot's memory."""
        for name, view in self.views(memory):
            self.parameters[name].data = view

    def hide(self) -> None:
        """Leave the block without values: whoever computes with them gets NaN."""
        for name, parameter in self.parameters.items():
            parameter.data = self._stubs[name]


def _make_stub(parameter: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the same shape and almost no memory; whoever computes with it gets NaN.

    Integers have none; they are what rows are packed in, whose scales are NaN then.
    """
    value = float("nan") if parameter.is_floating_point() else 0
    stub = torch.full((), value, dtype=parameter.dtype, device=device)
    return stub.expand(parameter.shape)


class Slot:
    """Room for one block on the device, and where its bytes arrive on the host.

    Args:
        size_bytes: of the largest block.
        device: where it computes.
        engine: copies.
    """

    def __init__(self, size_bytes: int, device: torch.device, engine: CopyEngine) -> None:
        self.host = engine.new_host((size_bytes,), torch.uint8)
        self.memory = self.host
        if not is_host(device):
            self.memory = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self.block: int | None = None
        self.is_shown = False
        self.ticket: Ticket | None = None
        self.copied: Ticket | None = None


def give_device_(module: nn.Module, name: str, parameter: Tensor, device: torch.device) -> None:
    """Replace a tensor on meta by one that says it is on `device`, without memory."""
    if not parameter.is_meta:
        return
    owner, _, leaf = name.rpartition(".")
    described = torch.empty((), dtype=parameter.dtype, device=device).expand(parameter.shape)
    if isinstance(parameter, nn.Parameter):
        described = nn.Parameter(described, requires_grad=parameter.requires_grad)
    setattr(module.get_submodule(owner), leaf, described)

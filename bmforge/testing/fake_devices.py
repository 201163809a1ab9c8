"""Simulates several accelerators with fake tensors; mixing devices raises an error.

The device type "lazy" is used because torch supports views on it without the hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

__all__ = ["FIRST", "SECOND", "FakeDevices"]

FIRST, SECOND = torch.device("lazy", 0), torch.device("lazy", 1)


class FakeDevices(FakeTensorMode):
    """Context manager in which tensors have a device and a shape but no values.

    For every operation, torch's fake tensors check that all arguments are on one device.
    """

    def place_(
        self, model: nn.Module, home: torch.device, blocks: Mapping[str, torch.device]
    ) -> None:
        """Replace a model's tensors with fake tensors, in place.

        Args:
            model: model on any device.
            home: device of everything outside the blocks.
            blocks: dict from block name to device.
        """
        for name, device in blocks.items():
            self._give_(model.get_submodule(name), device)
        self._give_(model, home)

    def move(self, values: Any, device: torch.device) -> Any:
        """Return nested values with every tensor replaced by a fake tensor on `device`."""
        return tree_map_only(Tensor, lambda tensor: self._describe(tensor, device), values)

    def _give_(self, module: nn.Module, device: torch.device) -> None:
        fakes: dict[int, Tensor] = {}
        for child in module.modules():
            for kind in (child._parameters, child._buffers):
                for name, tensor in kind.items():
                    if tensor is not None and tensor.device.type == "cpu":
                        if id(tensor) not in fakes:
                            fakes[id(tensor)] = self._describe(tensor, device)
                        kind[name] = fakes[id(tensor)]

    def _describe(self, tensor: Tensor, device: torch.device) -> Tensor:
        with self:
            fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake

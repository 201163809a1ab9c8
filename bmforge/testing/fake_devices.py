"""Running a model as if on several accelerators, without one: what mixes devices raises.

Of the kinds of devices that are not there "lazy" is one that torch can describe views on.
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
    """Inside it tensors have a device, a shape and no values.

    Torch's fake tensors check of every operation that what it takes is on one device.
    """

    def place_(
        self, model: nn.Module, home: torch.device, blocks: Mapping[str, torch.device]
    ) -> None:
        """Have a model's tensors be fake ones, in place.

        Args:
            model: whose they are.
            home: where what is in none of the blocks is.
            blocks: name -> device.
        """
        for name, device in blocks.items():
            self._give_(model.get_submodule(name), device)
        self._give_(model, home)

    def move(self, values: Any, device: torch.device) -> Any:
        """Return values whose tensors are fake ones on a device."""
        return tree_map_only(Tensor, lambda tensor: self._describe(tensor, device), values)

    def _give_(self, module: nn.Module, device: torch.device) -> None:
        made: dict[int, Tensor] = {}
        for one in module.modules():
            for kind in (one._parameters, one._buffers):
                for name, tensor in kind.items():
                    if tensor is not None and tensor.device.type == "cpu":
                        if id(tensor) not in made:
                            made[id(tensor)] = self._describe(tensor, device)
                        kind[name] = made[id(tensor)]

    def _describe(self, tensor: Tensor, device: torch.device) -> Tensor:
        with self:
            made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made

"""Blocks on several devices, one after the other: what goes in comes to a block's own device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from bmforge.surgery import unwrap_forward_, wrap_forward_

__all__ = ["spread_blocks_"]


def spread_blocks_(
    model: nn.Module, places: Mapping[str, torch.device], home: torch.device | None = None
) -> Callable[[], None]:
    """Have blocks compute where their weights are, in place; nothing else of the model knows.

    What a block is given comes to its device, masks and positions once for all blocks there. The
    states that it returns stay for the next; anything else that it returns goes home.

    Args:
        model: whose blocks they are; weights are not moved.
        places: name of a block -> its device, in the order in which they run.
        home: where the rest of the model is, to which the last block of every stack returns; None
            leaves everything where it came out.

    Returns:
        what takes this off again; weights stay where they are.

    Raises:
        ConfigError: a block is on devices already.
    """
    arrivals = {device: _Arrivals(device) for device in places.values()}
    last = {name.rpartition(".")[0]: name for name in places}
    for name, device in places.items():
        returns = home is not None and last[name.rpartition(".")[0]] == name
        wrapper = partial(_run_there, arrivals[device], home, returns)
        wrap_forward_(model.get_submodule(name), wrapper, "device")
    blocks = [model.get_submodule(name) for name in places]

    def take_off() -> None:
        with ExitStack() as each:  # the others too, where one refuses
            for block in blocks:
                each.callback(unwrap_forward_, block, "device")

    return take_off


class _Arrivals:
    """Brings tensors to a device, each once while it is alive and unchanged.

    What gradients flow through, and what was made in inference mode, is brought every time.

    Args:
        device: where to.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._known = WeakIdKeyDictionary()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Arrivals:
        """Return one that has brought nothing: a copied model sees other tensors."""
        return _Arrivals(self.device)

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the tensor on the device."""
        if tensor.device == self.device:
            return tensor
        if tensor.requires_grad or tensor.is_inference():  # of a graph, or without a version
            return tensor.to(self.device)
        version, moved = self._known.get(tensor, (None, None))
        if version != tensor._version or moved is None:
            moved = tensor.to(self.device)
            self._known[tensor] = tensor._version, moved
        return moved


def _run_there(
    bring: _Arrivals,
    home: torch.device | None,
    returns: bool,
    inner: Any,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    args, kwargs = tree_map_only(Tensor, bring, (args, kwargs))
    out = inner(*args, **kwargs)
    if home is None:
        return out
    go_home = partial(tree_map_only, Tensor, lambda tensor: tensor.to(home))
    if returns or isinstance(out, Mapping):
        return go_home(out)
    return type(out)((out[0], *go_home(out[1:]))) if type(out) in (tuple, list) else out

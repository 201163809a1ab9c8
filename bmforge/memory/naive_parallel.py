"""Naive model parallelism: the blocks of a model run one after the other on several devices."""

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
    """Make each block compute on its own device by moving its inputs there.

    Masks and positions are copied once per device. Hidden states stay on a device until a block on
    another device needs them; other outputs are moved to the home device.

    Args:
        model: model whose blocks are already on their devices; this function moves no weights.
        places: mapping from block name to device, in execution order.
        home: device of the modules outside of blocks, to which the last block of every stack moves
            its output. If None, outputs stay on the device of their block.

    Returns:
        a function that removes the hooks, without moving any weights.

    Raises:
        ConfigError: a block already has such a hook.
    """
    arrivals = {device: _MovedTensors(device) for device in places.values()}
    # The blocks of one container are one stack; encoder and decoder each end on the home device.
    last = {name.rpartition(".")[0]: name for name in places}
    for name, device in places.items():
        returns = home is not None and last[name.rpartition(".")[0]] == name
        wrapper = partial(_run_there, arrivals[device], home, returns)
        wrap_forward_(model.get_submodule(name), wrapper, "device")
    blocks = [model.get_submodule(name) for name in places]

    def take_off() -> None:
        with ExitStack() as each:  # undo all, even if one undo fails
            for block in blocks:
                each.callback(unwrap_forward_, block, "device")

    return take_off


class _MovedTensors:
    """Moves tensors to a device; a tensor that did not change is moved only once.

    Tensors with gradients and inference tensors are moved every time.

    Args:
        device: target device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._known = WeakIdKeyDictionary()

    def __deepcopy__(self, memo: dict[int, Any]) -> _MovedTensors:
        """Return an empty copy, because the copied model has different tensors."""
        return _MovedTensors(self.device)

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return `tensor` if it is on the device, otherwise a copy on the device."""
        if tensor.device == self.device:
            return tensor
        # Autograd needs a copy per graph, and inference tensors have no version counter.
        if tensor.requires_grad or tensor.is_inference():
            return tensor.to(self.device)
        version, moved = self._known.get(tensor, (None, None))
        if version != tensor._version or moved is None:
            moved = tensor.to(self.device)
            self._known[tensor] = tensor._version, moved
        return moved


def _run_there(
    bring: _MovedTensors,
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
    # Only the first output, the hidden states, stays for the next block.
    return type(out)((out[0], *go_home(out[1:]))) if type(out) in (tuple, list) else out

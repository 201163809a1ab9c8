"""Whether a model is still the one that computed what is kept of it.

A tensor counts how often it was written to; what is put elsewhere by `Tensor.data`, or into another
tensor, lies at another place. Deltas are weighed, hooks come and layers are replaced by attributes
of modules. Weights that come from elsewhere when their block runs lie somewhere else every time, so
of these the place does not count.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from bmforge.shards import is_streamed

__all__ = ["Changes"]

_PLAIN = {bool, int, float, str, type(None)}
_PLACED = (Tensor, nn.Parameter)


class Changes:
    """Notices that a model would answer otherwise than it did.

    What is written through `Tensor.data` into the same memory leaves no trace and is not noticed.

    Args:
        model: as it is now.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._remember()

    def since_last(self) -> bool:
        """Tell whether something differs from when this was asked last."""
        if self._facts == _find_facts(self._model) and self._is_whole():
            return False
        self._remember()
        return True

    def _remember(self) -> None:
        self._facts = _find_facts(self._model)
        # While all of them live no other object has the identity of one. They may go meanwhile.
        self._objects = [weakref.ref(one) for one in _find_objects(self._model)]

    def _is_whole(self) -> bool:
        return all(reference() is not None for reference in self._objects)


def _find_objects(model: nn.Module) -> Iterator[Any]:
    yield from model.modules()
    yield from model.parameters()
    yield from model.buffers()


def _find_facts(model: nn.Module) -> list[Any]:
    """Return what tells a model from another one; asked for often, so it is one plain loop."""
    facts: list[Any] = []
    left = [model]
    while left:
        module = left.pop()
        facts += (id(module), type(module))
        for name, one in vars(module).items():
            if name[0] != "_":
                facts += (name, one if type(one) in _PLAIN else id(one))
        if module is not model:  # the model itself is not called by shared steps, rows watch it so
            facts += module._forward_hooks  # by numbers that are given out once
            facts += module._forward_pre_hooks
        for tensors in (module._parameters, module._buffers):
            for tensor in tensors.values():
                if tensor is not None:
                    facts += _place_of(tensor)
        left += [child for child in module._modules.values() if child is not None]
    return facts


def _place_of(tensor: Tensor) -> tuple[int, int, int]:
    """Return which tensor it is, how often it was written to, and where it lies."""
    version = 0 if tensor.is_inference() else tensor._version
    lies = type(tensor) in _PLACED and not is_streamed(tensor)
    return id(tensor), version, tensor.data_ptr() if lies else 0

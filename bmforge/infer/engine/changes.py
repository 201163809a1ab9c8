"""Detects changes of a model's weights or structure, after which cached keys are invalid.

The comparison covers the modules, their hooks, their numeric and text attributes, and the identity,
version, address and content checksum of every tensor. The checksum is needed because fused
optimizers, ``Tensor.data`` and NumPy write without raising ``Tensor._version``. Streamed weights
change their address in every step, so their address and content are not compared.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.nn.triton_kernels import load_triton
from bmforge.shards import is_streamed

__all__ = ["Changes"]

_PLAIN = {bool, int, float, str, type(None)}
_PLACED = (Tensor, nn.Parameter)
_COLUMNS, _SAMPLES = 1024, 64
_GOLDEN, _MIXER = 0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64)


class Changes:
    """Compares a model with its state at the previous comparison.

    Args:
        model: model to watch.
        is_shared: whether the caller has a reference to the model and may change any element, so
            that checksums cover all elements. Otherwise only samples of frozen tensors are
            compared, at a thousandth of the cost, since only this package can change weights that
            it loaded itself.
    """

    def __init__(self, model: nn.Module, is_shared: bool = True) -> None:
        self._model, self._is_shared = model, is_shared
        self._factors: dict[tuple[int, torch.device], Tensor] = {}
        self._remember(_snapshot(model, is_shared, self._factors))

    def since_last(self) -> bool:
        """Return True if the model changed since the last call."""
        facts = _snapshot(self._model, self._is_shared, self._factors)
        if self._facts == facts and self._is_whole():
            return False
        self._remember(facts)
        return True

    def _remember(self, facts: list[Any]) -> None:
        self._facts = facts
        # An id is unique only while its object lives, so weak references detect freed objects.
        self._objects = [weakref.ref(item) for item in _find_objects(self._model)]

    def _is_whole(self) -> bool:
        return all(reference() is not None for reference in self._objects)


def _find_objects(model: nn.Module) -> Iterator[Any]:
    yield from model.modules()
    yield from model.parameters()
    yield from model.buffers()


def _snapshot(
    model: nn.Module, is_shared: bool, factors: dict[tuple[int, torch.device], Tensor]
) -> list[Any]:
    """Return the values that are compared: module classes, attributes, hooks, tensor states.

    `is_shared` is that of `Changes`; `factors` caches the multipliers of checksums.
    """
    facts: list[Any] = []
    sums: dict[torch.device, list[Tensor]] = {}
    hashed: dict[torch.device, list[tuple[Tensor, int]]] = {}
    left = [model]
    while left:
        module = left.pop()
        facts += (id(module), type(module))
        for name, value in vars(module).items():
            if name[0] != "_":
                facts += (name, value if type(value) in _PLAIN else id(value))
        if module is not model:  # batched steps do not call the model itself
            facts += module._forward_hooks  # keys are unique numbers
            facts += module._forward_pre_hooks
        for tensors in (module._parameters, module._buffers):
            for tensor in tensors.values():
                if tensor is None:
                    continue
                version = 0 if tensor.is_inference() else tensor._version
                facts += (id(tensor), version)
                if type(tensor) in _PLACED and not is_streamed(tensor) and not tensor.is_meta:
                    facts.append(tensor.data_ptr())
                    is_sampled = not is_shared and not tensor.requires_grad
                    step = _step(tensor, is_sampled)
                    if tensor.is_contiguous() and load_triton(tensor.device) is not None:
                        hashed.setdefault(tensor.device, []).append((tensor, step))
                    else:
                        total = _checksum(tensor.detach(), step, factors)
                        sums.setdefault(tensor.device, []).append(total)
        left += [child for child in module._modules.values() if child is not None]
    for device, pairs in hashed.items():
        kernels: Any = load_triton(device)
        tensors, steps = zip(*(pair for pair in pairs if pair[0].numel()), strict=True)
        sums.setdefault(device, []).append(kernels.checksum(tensors, steps))
    for totals in sums.values():  # one wait for each device
        facts += torch.stack(totals).tolist()
    return facts


def _step(tensor: Tensor, is_sampled: bool) -> int:
    """Return n, where the checksum of a tensor reads every n-th element.

    n is odd, so that samples are not all from the same column.
    """
    return max(1, tensor.numel() // _SAMPLES) | 1 if is_sampled else 1


def _checksum(tensor: Tensor, step: int, factors: dict[tuple[int, torch.device], Tensor]) -> Tensor:
    """Return a linear hash of a tensor's bytes modulo 2**64, with a weight per position.

    The weight of word (i, j) in rows of `_COLUMNS` words is r_i + c_j with random r and c. The hash
    therefore needs only sums over rows and columns, and also detects swapped neurons. r is even
    and c odd, so every weight is odd and no change of a single word is multiplied to zero.
    """
    data = tensor.reshape(-1)[::step].contiguous().view(torch.uint8)
    if data.data_ptr() % 8:
        data = data.clone()
    num_words = data.numel() // 8
    total = data[8 * num_words :].long().sum()
    rows = num_words // _COLUMNS
    words = data[: 8 * num_words].view(torch.int64)
    table = words[: rows * _COLUMNS].view(rows, _COLUMNS)
    parts = [(words[rows * _COLUMNS :], 1)]
    if rows:
        parts += [(table.sum(0), 1), (table.sum(1), 2)]
    for part, scale in parts:
        key = len(part), part.device
        if key not in factors:
            factors[key] = _multipliers(part)
        total = total + scale * (part * factors[key]).sum()
    return total


def _multipliers(like: Tensor) -> Tensor:
    """Return an odd pseudo-random multiplier for each element of `like`.

    Source: mixing function of Steele et al., "Fast splittable pseudorandom number generators"
    (2014).
    """
    mixed = torch.arange(1, len(like) + 1, device=like.device) * _GOLDEN
    mixed = (mixed ^ (mixed >> 30)) * _MIXER
    return (mixed ^ (mixed >> 27)) | 1

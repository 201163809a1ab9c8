"""Tracks the lifetime of every storage of a training step, and counts the cost of operators.

Works with fake and with real tensors; tests with real tensors verify the planner.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from bmforge.parallel.planner.fake_op_cache import FakeOpCache, tensors_of

T = TypeVar("T")

__all__ = ["FIRST_END", "INSIDE", "LAST_END", "PARTS", "StorageTracker"]

PARTS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "communication",
    "unsharded gradients",
)
# Owner of a storage: the blocks, or the modules before them or after them.
INSIDE, FIRST_END, LAST_END = range(3)
_ACTIVATIONS = PARTS.index("activations")
_LOGITS, _COMMUNICATION = PARTS.index("logits"), PARTS.index("communication")
_DEVICE = torch.ops.prim.device.default
# DTensor runs the operator once more to compute the shape of a result; no other code does so.
_SHAPE_PROPAGATION = -1
# Files whose allocations have a fixed purpose, whatever code calls them.
_OWNERS = {
    "nn/losses.py": _LOGITS,
    "nn/tiled_logits.py": _LOGITS,
    "nn/device_loss.py": _LOGITS,
    "fsdp/_fully_shard": _COMMUNICATION,
    "parallel/collectives.py": _COMMUNICATION,
    "context/ring.py": _COMMUNICATION,
    "tensor/_sharding_prop.py": _SHAPE_PROPAGATION,
}
_FRAMES = 12
# In these collectives Gloo allocates a second buffer as large as the gathered or scattered data.
# All-reduces, broadcasts and messages need none (measured with benchmarks/allocator_peak.c).
_COPIED = {
    "c10d::_allgather_base_",
    "c10d::_reduce_scatter_base_",
    "_c10d_functional::all_gather_into_tensor",
    "_c10d_functional::reduce_scatter_tensor",
}


@dataclass
class _Storage:
    """Live storage: its size, its category, its owner, and the events that refer to it."""

    ref: Any
    size: int
    part: int
    end: int = INSIDE
    events: list[int] = field(default_factory=list)


class StorageTracker(TorchDispatchMode):
    """Dispatch mode that records every allocation and release of a storage, and operator costs.

    Args:
        copies: whether collectives allocate their own buffer, as they do on CPUs.
        outcomes: cached results of fake operators from other followers.
    """

    def __init__(self, copies: bool = False, outcomes: FakeOpCache | None = None) -> None:
        super().__init__()
        self.outcomes = outcomes or FakeOpCache()
        self.copies, self.end = copies, INSIDE
        self.events: list[tuple[int, int, int]] = []
        self.alive: dict[int, _Storage] = {}
        self.resizable: dict[int, _Storage] = {}
        self.flops = self.traffic_bytes = 0.0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch keeps its compiler enabled; this mode compiles nothing."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, and record the storages of its results."""
        if func is _DEVICE:  # the most frequent call of autograd on fake tensors
            return args[0].device
        if _has_shards(types):
            return NotImplemented
        kwargs = kwargs or {}
        part = _part_of_caller(2)
        self.note_resizes()
        out = self.outcomes.run(func, args, kwargs)
        if part == _SHAPE_PROPAGATION:
            return out
        outputs = list(tensors_of(out))
        for tensor in outputs:
            self._follow(tensor.untyped_storage(), part)
        if self.copies and func._schema.name in _COPIED:
            self._copy(tensors_of((args, kwargs, out)))
        self._count(func, args, kwargs, out, outputs, part)
        return out

    def shorten(self, items: Iterable[T], size_of: Callable[[T], Hashable]) -> Iterator[T]:
        """Yield the first two items of every size; the second one's cost counts for all later ones.

        It shortens a loop that does the same work for all items of the same size. Later iterations
        use as much memory as the second one, so only the operator costs are multiplied.
        """
        counts: dict[Hashable, int] = {}
        recorded = []
        for item in items:
            size = size_of(item)
            counts[size] = counts.get(size, 0) + 1
            if counts[size] <= 2:
                recorded.append((item, size, counts[size] == 2))
        for item, size, is_second in recorded:
            before = self.flops, self.traffic_bytes
            yield item
            if is_second:
                again = counts[size] - 2
                self.flops += again * (self.flops - before[0])
                self.traffic_bytes += again * (self.traffic_bytes - before[1])

    def register(self, tensors: Iterable[Tensor]) -> None:
        """Register the storages of tensors that exist before the trace starts."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self.alive.setdefault(storage._cdata, _Storage(storage, 0, 0))

    def assign(self, tensors: Iterable[Tensor], part: int, end: int) -> None:
        """Set the category (`part`) and owner (`end`) of storages that are already recorded."""
        self.note_resizes()
        for tensor in tensors:
            record = self.alive.get(tensor.untyped_storage()._cdata)
            if record is not None and (record.part, record.end) != (part, end):
                for index in record.events:
                    self.events[index] = (self.events[index][0], part, end)
                record.part, record.end = part, end

    def note_resizes(self) -> None:
        """Record the storages that FSDP has freed or allocated since the last check.

        FSDP resizes the storages of gathered parameters directly, without an operator.
        """
        for record in self.resizable.values():
            storage = record.ref()
            if storage is not None and storage.nbytes() != record.size:
                self._note(record, storage.nbytes() - record.size)

    def _follow(self, storage: torch.UntypedStorage, part: int) -> None:
        key = storage._cdata
        if key in self.alive:
            return
        reference = weakref.ref(storage, lambda _: self._forget(key))
        record = self.alive[key] = _Storage(reference, 0, part, self.end)
        if part == _COMMUNICATION:
            self.resizable[key] = record
        self._note(record, storage.nbytes())

    def _note(self, storage: _Storage, change: int) -> None:
        if change:
            storage.events.append(len(self.events))
            storage.size += change
            self.events.append((change, storage.part, storage.end))

    def _forget(self, key: int) -> None:
        self.note_resizes()  # in the order in which they happened
        self.resizable.pop(key, None)
        storage = self.alive.pop(key)
        self._note(storage, -storage.size)

    def _copy(self, sides: Iterable[Tensor]) -> None:
        """Record the temporary buffer of a collective, sized for the larger of input and output."""
        size = max(t.numel() * t.element_size() for t in sides)
        self.events += [(size, _COMMUNICATION, self.end), (-size, _COMMUNICATION, self.end)]

    def _count(
        self, func: Any, args: Any, kwargs: Any, out: Any, outputs: list[Tensor], part: int
    ) -> None:
        formula = flop_registry.get(func._overloadpacket)
        if "scaled_dot_product" in func._schema.name:
            self.flops += _attention_flops(func._schema.name, args, kwargs)
        elif formula is not None:
            self.flops += formula(*args, **kwargs, out_val=out)
        elif func._schema.name in _GROUPED:
            rows, other = args[0], args[1]
            self.flops += 2 * rows.numel() * other.shape[-2 if other.dim() == 3 else -1]
        elif not _is_free(func) and part != _COMMUNICATION:
            # FSDP's copies overlap with matrix products, on a separate stream.
            moved = (*tensors_of((args, kwargs)), *outputs)
            self.traffic_bytes += sum(t.numel() * t.element_size() for t in moved)


# Grouped matrix products, one matrix per group: (S, D) x (E, F, D), and their weight gradients,
# (S, F) x (S, D).
_GROUPED = {"bmforge::grouped_linear", "bmforge::grouped_outer"}
_FREE = {f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "detach", "t")}


@cache
def _is_free(func: Any) -> bool:
    return func.is_view or func._schema.name in _FREE


@cache
def _has_shards(types: tuple[type, ...]) -> bool:
    return any(issubclass(kind, DTensor) for kind in types)


def _attention_flops(name: str, args: Any, kwargs: Any) -> float:
    """Return the FLOPs of fused attention: 2 products forward, 5 backward; half if causal."""
    backward = "backward" in name
    query, key = args[int(backward)], args[int(backward) + 1]
    products = 5 if backward else 2
    causal = any(value is True for value in (*args, *kwargs.values()))
    return products * 2 * math.prod(query.shape) * key.shape[2] / (2 if causal else 1)


def _part_of_caller(above: int) -> int:
    """Return the category of an allocation, inferred from the file that called the operator.

    The search for the file begins `above` frames above this function.
    """
    frame: Any = sys._getframe(above)
    for _ in range(_FRAMES):
        if frame is None:
            break
        part = _part_of_file(frame.f_code.co_filename)
        if part is not None:
            return part
        frame = frame.f_back
    return _ACTIVATIONS


@cache
def _part_of_file(name: str) -> int | None:
    return next((part for file, part in _OWNERS.items() if file in name), None)

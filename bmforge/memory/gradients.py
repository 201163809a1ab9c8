"""Gradient offload: each gradient is copied to the host as soon as backward has computed it.

`offload.py` selects the parameters; the optimizers that use the gradients are in `train/offload`.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bmforge.device import accumulation_dtype
from bmforge.memory.copies import CopyEngine, CopyHandle
from bmforge.memory.spill import SpillFile
from bmforge.memory.state_storage import StateStorage
from bmforge.records import find_parallel_record, metadata_of, set_metadata_, units_of
from bmforge.shards import local_tensor

__all__ = [
    "CopyLimit",
    "Gradient",
    "OffloadedGradient",
    "offloaded_gradient",
    "wait_before_use",
]


class CopyLimit:
    """Limits the bytes of unfinished copies, so that backward waits for a slow disk.

    Args:
        limit_bytes: maximum bytes of unfinished copies, not counting the newest copy.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes, self._total_bytes = limit_bytes, 0
        self._sent: deque[tuple[CopyHandle, int]] = deque()

    def admit(self, ticket: CopyHandle, size_bytes: int) -> None:
        """Add a copy, and block until the bytes of unfinished copies are below the limit."""
        while self._sent and self._total_bytes > self._limit_bytes:
            oldest, size = self._sent.popleft()
            # The copies end in order of submission, so the oldest is the first that can free
            # memory.
            oldest.wait_on_host()
            self._total_bytes -= size
        self._sent.append((ticket, size_bytes))
        self._total_bytes += size_bytes


@dataclass(frozen=True)
class Gradient:
    """A flat gradient on the host that is read in ranges.

    Args:
        part: function (start, stop) that returns this range of the stored elements.
        dtype: dtype of the returned elements.
        factors: scale factors, applied in order.
    """

    part: Callable[[int, int], Tensor]
    dtype: torch.dtype
    factors: tuple[float, ...] = ()

    def read(self, start: int, stop: int) -> Tensor:
        """Return scaled elements; call this once per range, as scaling may be in place."""
        values = self.part(start, stop).to(self.dtype)
        for factor in self.factors:
            values.mul_(factor)
        return values


class OffloadedGradient:
    """Offloaded gradient of one parameter, copied to the host as soon as it is computed.

    The gradients of several micro-batches are summed on the host in fp32. The object is attached to
    its parameter.

    Args:
        parameter: parameter whose `.grad` is freed after every backward.
        engine: copy engine; its thread also sums the gradients.
        backlog: limit on unfinished copies, shared by all parameters.
        disk: file in which the gradient is stored; None means host memory.
        label: name of the gradient in recorded events.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        engine: CopyEngine,
        backlog: CopyLimit,
        disk: SpillFile | None = None,
        label: str = "",
    ) -> None:
        self._parameter = weakref.ref(parameter)
        self._engine, self._label, self._backlog = engine, label, backlog
        local = local_tensor(parameter.detach())
        self.dtype = accumulation_dtype(local.dtype)
        self._home = StateStorage(local.numel(), dtype=self.dtype, disk=disk)
        # The first gradient keeps its dtype: a bf16 gradient needs half as many bytes.
        self._first: Tensor | None = None
        self._norm: Tensor | None = None
        self._factors: list[float] = []
        self._count = 0
        self._ticket: CopyHandle | None = None
        set_metadata_(parameter, offloaded_gradient=self)
        # A weak reference: autograd's hooks are invisible to the garbage collector.
        leave = weakref.WeakMethod(self._leave)

        def call(produced: Tensor) -> None:
            if (method := leave()) is not None:
                method(produced)

        self._handle = parameter.register_post_accumulate_grad_hook(call)

    @property
    def is_here(self) -> bool:
        """True if backward has computed a gradient since the last `clear`."""
        return self._count > 0

    def norm(self) -> Tensor:
        """Return the scaled 2-norm of the accumulated gradient, on the parameter's device."""
        assert self._ticket is not None
        self._ticket.wait_on_host()
        assert self._norm is not None
        norm = self._norm
        for factor in self._factors:
            norm = norm * factor
        return norm

    def scale_(self, factor: float) -> None:
        """Multiply the gradient by `factor`, which is applied when the gradient is read."""
        self._factors.append(factor)

    def take(self) -> Gradient:
        """Return the summed gradient, which only later tasks of the engine's thread may read."""
        if self._count == 1 and not self._home.is_on_disk:
            assert self._first is not None
            flat = self._first
            return Gradient(lambda start, stop: flat[start:stop], self.dtype, tuple(self._factors))
        return Gradient(self._home.fetch, self.dtype, tuple(self._factors))

    def clear(self) -> None:
        """Start a new sum; tasks already submitted still read the previous sum."""
        self._count, self._factors, self._norm, self._first = 0, [], None, None

    def close(self) -> None:
        """Stop offloading, so that later gradients stay in `.grad`."""
        self._handle.remove()
        if (parameter := self._parameter()) is not None:
            set_metadata_(parameter, offloaded_gradient=None)

    @torch.no_grad()
    def _leave(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient = local_tensor(parameter.grad).detach()
        is_first = self._count == 0
        self._count += 1
        if is_first:  # with more micro-batches the host computes the norm of the sum
            self._norm = torch.linalg.vector_norm(gradient, dtype=self.dtype)
        staging = self._engine.new_host(tuple(gradient.shape), gradient.dtype)
        copied = self._engine.copy_(staging, gradient, f"gradient of {self._label}")
        # The copy engine holds the gradient's memory until the copy is done; autograd starts a new
        # sum.
        parameter.grad = None
        # The task runs later, when `self._first` may belong to another step, so it takes this
        # value.
        before = self._first
        self._first = staging.view(-1) if is_first else None

        def add() -> None:
            copied.wait_on_host()
            self._add(staging.view(-1), is_first, before)

        self._ticket = self._engine.run(add, f"sum of {self._label}")
        self._backlog.admit(self._ticket, staging.numel() * staging.element_size())

    def _add(self, values: Tensor, is_first: bool, before: Tensor | None) -> None:
        if is_first:
            if self._home.is_on_disk:
                self._home.put(0, values)
            return
        # The second micro-batch moves the first one, kept in its own dtype so far, to the fp32 sum.
        if before is not None and not self._home.is_on_disk:
            self._home.put(0, before)
        total = self._home.fetch().add_(values.to(self.dtype))
        self._home.put(0, total)
        self._norm = torch.linalg.vector_norm(total, dtype=self.dtype)


def offloaded_gradient(parameter: Tensor) -> OffloadedGradient | None:
    """Return the `OffloadedGradient` of a parameter, or None if its gradient is not offloaded."""
    left: OffloadedGradient | None = metadata_of(parameter).offloaded_gradient
    return left if left is not None and left.is_here else None


def wait_before_use(
    model: nn.Module, wait: Callable[[Iterable[nn.Parameter]], None]
) -> list[RemovableHandle]:
    """Register hooks that call `wait` with the parameters that a module is about to use.

    An FSDP unit all-gathers its parameters, so its hook waits for these parameters and for those of
    the units that it prefetches. The root module waits for the parameters outside of units.

    Returns:
        handles that remove the hooks.
    """
    units = _outermost(unit.module for unit in units_of(model) if unit.is_gathered)
    record = find_parallel_record(model)
    ahead = 1 + (1 if record is None else record.prefetch)
    owned = [list(unit.parameters()) for unit in units]
    inside = {id(parameter) for part in owned for parameter in part}
    others = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    handles = [_hook(model, others, wait)]
    for index, unit in enumerate(units):
        needed = [parameter for part in owned[index : index + ahead] for parameter in part]
        handles.append(_hook(unit, needed, wait))
    return handles


def _hook(
    module: nn.Module,
    needed: list[nn.Parameter],
    wait: Callable[[Iterable[nn.Parameter]], None],
) -> RemovableHandle:
    # Before FSDP2's own hook, which gathers the parameters.
    return module.register_forward_pre_hook(lambda *args: wait(needed), prepend=True)


def _outermost(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules that are not submodules of another module of the list."""
    candidates = list(modules)
    inner = {id(m) for outer in candidates for m in outer.modules() if m is not outer}
    return [module for module in candidates if id(module) not in inner]

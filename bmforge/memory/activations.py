"""Activation offload: tensors saved for backward stay on the host until backward uses them.

A block's saved tensors are copied to the host while the next block computes. In backward they are
copied back one block ahead. The device thus holds the activations of about two blocks, regardless
of the depth of the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from bmforge.memory.copies import CopyEngine, CopyHandle
from bmforge.shards import local_tensor
from bmforge.surgery import wrap_forward_

__all__ = ["apply_activation_offload_"]

# Smaller tensors stay on the device, because each copy has a fixed cost.
_SMALLEST_ELEMENTS = 1 << 12


class _Pool:
    """Pool of reusable host buffers, because page-locking new memory in every step is slow."""

    def __init__(self, engine: CopyEngine) -> None:
        self._engine = engine
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        buffers = self._free.setdefault((numel, dtype), [])
        return buffers.pop() if buffers else self._engine.new_host((numel,), dtype)

    def give(self, buffer: Tensor) -> None:
        self._free[buffer.numel(), buffer.dtype].append(buffer)


class _OffloadedTensor:
    """One offloaded tensor and its pending copies."""

    def __init__(self, tensor: Tensor, engine: CopyEngine, pool: _Pool, label: str) -> None:
        self._engine, self._pool, self._label = engine, pool, label
        self._size, self._stride, self._device = tensor.shape, tensor.stride(), tensor.device
        self._host = pool.take(tensor.numel(), tensor.dtype)
        self._left = engine.copy_(self._shaped(self._host), tensor.detach(), f"out {label}")
        self._back: tuple[Tensor, CopyHandle] | None = None
        # Keeps the device memory until `release`: the copy may still read it.
        self._source: Tensor | None = tensor
        self._version = tensor._version

    def _shaped(self, flat: Tensor) -> Tensor:
        # Same strides, so that backward selects the same kernels.
        return flat.as_strided(self._size, self._stride)

    def release(self) -> None:
        """Free the device tensor once its copy to the host is complete."""
        if self._source is None:
            return
        # Only the stream waits on an accelerator, so the host does not stop between blocks; later
        # kernels that reuse the memory are queued behind the copy.
        self._left.wait()
        assert self._source._version == self._version, (
            f"{self._label} was modified in place after it was saved for backward"
        )
        self._source = None

    def fetch(self) -> None:
        """Start the copy of the tensor from the host back to the device."""
        if self._back is None and self._source is None:
            on_device = torch.empty(self._host.shape, dtype=self._host.dtype, device=self._device)
            self._back = on_device, self._engine.copy_(on_device, self._host, f"in {self._label}")

    def get(self) -> Tensor:
        """Return the device tensor, after its copy from the host is complete."""
        if self._source is not None:
            return self._source
        self.fetch()
        assert self._back is not None
        on_device, ticket = self._back
        ticket.wait()
        return self._shaped(on_device)

    def __del__(self) -> None:
        # Pending copies of a buffer precede those of its next user, as copies run in order.
        self._pool.give(self._host)


class _Call:
    """Offloaded tensors that one call of a block saved for backward.

    Args:
        before: previous call, whose backward runs directly after the backward of this call.
    """

    def __init__(self, number: int, before: _Call | None) -> None:
        self.number = number
        # Only autograd's graph holds the tensors: their buffers return to the pool as soon as
        # backward has used them or the graph is freed.
        self.slots: weakref.WeakSet[_OffloadedTensor] = weakref.WeakSet()
        # Weak: a strong chain would keep every earlier call of the run alive.
        self._before = None if before is None else weakref.ref(before)
        self._is_prefetched = False

    def release(self) -> None:
        for slot in list(self.slots):
            slot.release()

    def prefetch(self) -> None:
        """When this call's backward begins, prefetch its tensors and those of the previous call."""
        if self._is_prefetched:
            return
        self._is_prefetched = True
        for slot in list(self.slots):
            slot.fetch()
        before = None if self._before is None else self._before()
        if before is not None:
            for slot in list(before.slots):
                slot.fetch()


class _Offload:
    """Wraps the forward of blocks and keeps track of the order in which they are called."""

    def __init__(self, engine: CopyEngine, smallest: int) -> None:
        self.engine, self._smallest = engine, smallest
        self._pool = _Pool(engine)
        self._last: _Call | None = None

    def run_offloaded(
        self,
        number: int,
        block: nn.Module,
        inner: Callable[..., Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run a block and offload its saved tensors to the host."""
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        record = _Call(number, self._last)
        if self._last is not None:
            self._last.release()
        self._last = record
        seen: dict[tuple[Any, ...], _OffloadedTensor] = {}
        with saved_tensors_hooks(lambda t: self._pack(t, record, seen, block), _unpack):
            return inner(*args, **kwargs)

    def run_resident(self, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a block without offloading its saved tensors."""
        if self._last is not None and torch.is_grad_enabled():
            self._last.release()
        return inner(*args, **kwargs)

    def _pack(
        self,
        tensor: Tensor,
        record: _Call,
        seen: dict[tuple[Any, ...], _OffloadedTensor],
        block: nn.Module,
    ) -> Any:
        is_small = tensor.numel() < self._smallest
        if is_small or not _is_dense(tensor):
            return tensor
        # Parameters are not offloaded; FSDP frees their gathered copies after the block, so their
        # addresses are compared now.
        if any(_address(local_tensor(p)) == _address(tensor) for p in block.parameters()):
            return tensor
        # Several operations may save the same tensor, which lives until the next block begins.
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if key not in seen:
            label = f"block {record.number}, tensor {len(seen)}"
            seen[key] = _OffloadedTensor(tensor, self.engine, self._pool, label)
            record.slots.add(seen[key])
        return record, seen[key]


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    record, slot = packed
    # The first tensor that backward unpacks shows that the backward of this block has begun.
    record.prefetch()
    return slot.get()


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, to recognize tensors that share memory."""
    return tensor.untyped_storage().data_ptr()


def _is_dense(tensor: Tensor) -> bool:
    """Return True if a tensor occupies contiguous memory, in any order of its dims."""
    if type(tensor) is not Tensor or not tensor.is_floating_point():
        return False
    pairs = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    expected = 1
    for stride, length in pairs:
        if length != 1:
            if stride != expected:
                return False
            expected *= length
    return True


def apply_activation_offload_(
    blocks: Sequence[nn.Module],
    engine: CopyEngine,
    *,
    keep_last: int = 1,
    smallest_elements: int = _SMALLEST_ELEMENTS,
) -> None:
    """Offload the blocks' saved tensors to the host; parameter names do not change.

    After `apply_recompute_` a block saves only its input, which is then offloaded.

    Args:
        blocks: blocks in execution order.
        engine: copy engine.
        keep_last: number of last blocks that are not offloaded, because backward needs them at
            once.
        smallest_elements: minimum size of offloaded tensors in elements.

    Memory: the device holds the activations of about two blocks and of the `keep_last` last blocks;
    the host holds all others, in reused buffers.
    """
    offload = _Offload(engine, smallest_elements)
    sent = len(blocks) - keep_last
    for number, block in enumerate(blocks):
        wrapper = (
            partial(offload.run_offloaded, number, block) if number < sent else offload.run_resident
        )
        wrap_forward_(block, wrapper, "activations")

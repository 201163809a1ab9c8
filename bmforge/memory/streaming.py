"""Layer streaming: blocks that do not fit on the device are copied there before they run.

Some blocks may stay resident; the others share a few slots. The order of the last pass predicts
which blocks come next, so a slot is refilled as soon as its block has run. Streamed blocks
recompute their activations in backward, when their weights are on the device again. Training and
inference use the same streamer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.memory.copies import CopyEngine, make_copy_engine
from bmforge.memory.order import BlockExecution, RunOrder
from bmforge.memory.packed import PackedBlock, Slot, replace_with_stub_
from bmforge.memory.recompute import apply_recompute_
from bmforge.memory.resident import NUM_SLOTS, spread_resident
from bmforge.records import parallel_record_of, set_metadata_, units_of
from bmforge.shards import local_tensor
from bmforge.surgery import persistent_tensors, shared_tensors, wrap_forward_

__all__ = ["ReadWeights", "Streamer", "spread_resident", "stream_blocks_"]

ReadWeights = Callable[[str, Tensor], None]
"""Function (parameter name, target) that reads a parameter into a contiguous host tensor."""

Stays = Callable[[str, Tensor], bool]
"""Function (full name, tensor) that returns True if a streamed block's tensor stays resident."""


@runtime_checkable
class ReadsMany(Protocol):
    """A `ReadWeights` function that can also read several tensors at once, which is faster."""

    def read_all(self, targets: Mapping[str, Tensor]) -> None:
        """Read several tensors; `targets` maps each name to the tensor to fill."""


class Streamer:
    """Copies blocks to the device ahead of use, while earlier blocks compute.

    Args:
        blocks: name and module of the streamed blocks, in execution order.
        read: reader of the weights.
        device: compute device.
        engine: copy engine; if None, one is created.
        on_host: names of blocks whose bytes are cached in host memory after the first read.
        stays: function that returns True for tensors of these blocks that stay resident; if None,
            all tensors are streamed.
    """

    def __init__(
        self,
        blocks: Sequence[tuple[str, nn.Module]],
        read: ReadWeights,
        device: torch.device,
        engine: CopyEngine | None = None,
        on_host: Collection[str] = (),
        stays: Stays | None = None,
    ) -> None:
        self.read, self.device = read, device
        self.engine = engine or make_copy_engine(device, "bmforge-streaming")
        self.blocks = []
        for prefix, module in blocks:
            own = {f"{prefix}.{n}": t for n, t in persistent_tensors(module).items()}
            streamed = {n: t for n, t in own.items() if stays is None or not stays(n, t)}
            self.blocks.append(PackedBlock(prefix, module, streamed, device, prefix in on_host))
        # Every slot has the largest size, so any block fits into any slot and blocks can differ.
        largest = max(block.size_bytes for block in self.blocks)
        count = min(NUM_SLOTS, len(self.blocks))
        self._slots = [Slot(largest, device, self.engine) for _ in range(count)]
        self._order = RunOrder(len(self.blocks))
        for number, block in enumerate(self.blocks):
            block.hide()
            wrap_forward_(block.module, partial(self._run, number), "weights")

    @property
    def names(self) -> list[str]:
        """Names of the streamed parameters."""
        return [name for block in self.blocks for name in block.parameters]

    def forget(self) -> None:
        """Discard weights cached on device and host, because the stored weights have changed."""
        for slot in self._slots:
            self._clear(slot)
        for block in self.blocks:
            block.kept = None

    def close(self) -> None:
        """Stop the copy engine; the model cannot run afterwards."""
        self.forget()
        self.engine.close()

    def _run(self, number: int, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        # Recomputation in backward calls the same forward; inside the autograd engine the id is not
        # -1.
        is_backward = torch._C._current_graph_task_id() != -1
        self._enter(number, is_backward)
        out = inner(*args, **kwargs)
        if not is_backward:  # backward still computes gradients with the weights
            self._request(self._order.coming(len(self._slots), with_this=False))
        return out

    def _enter(self, number: int, is_backward: bool) -> None:
        """Wait for the weights of block `number` and start copying those of the next blocks."""
        phase = "forward" if torch.is_grad_enabled() else "plain"
        self._order.enter(BlockExecution("backward" if is_backward else phase, number))
        # The current block is in the list, so its slot is not given to a block that comes later.
        self._request(self._order.coming(len(self._slots), with_this=True))
        slot = self._slot_of(number)
        assert slot is not None
        if not slot.is_shown:
            self._wait_for(slot)
            self.blocks[number].show(slot.memory)
            slot.is_shown = True
        self.engine.note("computes", f"block {number}")

    def _request(self, numbers: Sequence[int]) -> None:
        """Start copying missing blocks into slots whose current blocks are not needed soon."""
        free = [slot for slot in self._slots if slot.block not in numbers]
        missing = [number for number in numbers if self._slot_of(number) is None]
        # The missing blocks are in the order of use, so the one that is needed first is copied
        # first.
        for number, slot in zip(missing, free, strict=False):
            self._fetch(number, slot)

    def _slot_of(self, number: int) -> Slot | None:
        return next((slot for slot in self._slots if slot.block == number), None)

    def _fetch(self, number: int, slot: Slot) -> None:
        """Start copying a block into a slot."""
        # This settles the slot's last read, after which its thread no longer changes `slot.copied`.
        self._clear(slot)
        slot.block = number
        block, before = self.blocks[number], slot.copied
        # Work queued before this mark may still read the slot's previous block.
        mark = self.engine.mark()

        def work() -> None:
            source = slot.host
            if block.is_on_host:
                source = self._keep(block)
            else:
                if before is not None:
                    before.wait_on_host()  # the previous copy out of the slot's host buffer is done
                self._read(block, slot.host)
            # On a CPU the slot's host buffer is its memory, and the read above has already filled
            # it.
            if slot.memory is not source:
                size, label = block.size_bytes, f"copy block {number}"
                slot.copied = self.engine.copy_(
                    slot.memory[:size], source[:size], label, after=mark
                )

        slot.ticket = self.engine.run(work, f"read block {number}")

    def _keep(self, block: PackedBlock) -> Tensor:
        """Return a block's bytes in host memory; the first call reads them."""
        if block.kept is None:
            memory = self.engine.new_host((block.size_bytes,), torch.uint8)
            self._read(block, memory)
            # Set after the read: if it fails, the next use reads again instead of taking unfilled
            # memory.
            block.kept = memory
        return block.kept

    def _read(self, block: PackedBlock, memory: Tensor) -> None:
        views = dict(block.views(memory))
        if isinstance(self.read, ReadsMany):
            self.read.read_all(views)
            return
        for name, view in views.items():
            self.read(name, view)

    def _wait_for(self, slot: Slot) -> None:
        """Wait until the requested block is in its slot."""
        ticket, slot.ticket = slot.ticket, None
        assert ticket is not None
        try:
            ticket.wait()
        except BaseException:
            slot.block = None  # the next use requests it again
            for other in self._slots:  # prefetches that failed for the same reason
                if other.ticket is not None:
                    self._clear(other)
            raise
        # The read task sets `copied`, so it is known only after the ticket above.
        if slot.copied is not None:
            slot.copied.wait()

    def _clear(self, slot: Slot) -> None:
        if slot.ticket is not None:
            slot.ticket.settle()  # ignores errors: the block is no longer needed
            slot.ticket = None
        # The parameters must not view memory that the next block overwrites.
        if slot.block is not None and slot.is_shown:
            self.blocks[slot.block].hide()
        slot.block, slot.is_shown = None, False


def stream_blocks_(
    model: nn.Module,
    read: ReadWeights,
    *,
    device: torch.device,
    blocks: Sequence[str] | None = None,
    engine: CopyEngine | None = None,
    resident: Collection[str] = (),
    on_host: Collection[str] = (),
    stays: Stays | None = None,
) -> Streamer:
    """Stream the weights of a model's blocks; other weights are not streamed.

    Call this while the model is on the meta device: loading or initializing it then skips the
    streamed weights.

    Args:
        model: model, possibly on the meta device.
        read: function that reads weights, such as `models.weight_reader`.
        device: compute device.
        blocks: names of the modules to stream, in execution order; None means all blocks. They may
            differ in structure.
        engine: copy engine; if None, one is created.
        resident: names of blocks that stay on the device; see `spread_resident`.
        on_host: names of streamed blocks whose bytes are cached in host memory.
        stays: function that returns True for tensors of streamed blocks that stay resident; tensors
            that several modules share always stay resident.

    Raises:
        ConfigError: there are no blocks to stream, a block does not exist, or a parameter is
            sharded.

    Memory: `NUM_SLOTS` times the weights of the largest streamed block on the device; with an
    accelerator also the same amount of page-locked host memory.
    """
    found_blocks = _find_blocks(model, blocks, resident, on_host)
    shared = shared_tensors(model)

    def is_resident(name: str, tensor: Tensor) -> bool:
        return id(tensor) in shared or (stays is not None and stays(name, tensor))

    for name, module in found_blocks:
        for own, parameter in persistent_tensors(module).items():
            if local_tensor(parameter) is not parameter:
                raise ConfigError(
                    f"{name}.{own} is sharded over processes, but streaming supports a single "
                    "process only. Use streaming or sharding, not both."
                )
            if not is_resident(f"{name}.{own}", parameter):
                replace_with_stub_(module, own, parameter, device)
    streamer = Streamer(found_blocks, read, device, engine, on_host, is_resident)
    # Autograd must not save a streamed weight: its slot has other values when backward begins.
    apply_recompute_([module for _, module in found_blocks])
    record = parallel_record_of(model)
    record.streamers = (*record.streamers, streamer)
    for block in streamer.blocks:
        for name, parameter in block.parameters.items():
            set_metadata_(parameter, origin=_Streamed(streamer, name, parameter.dtype))
    return streamer


def _find_blocks(
    model: nn.Module,
    blocks: Sequence[str] | None,
    resident: Collection[str],
    on_host: Collection[str],
) -> list[tuple[str, nn.Module]]:
    """Return the name and module of every streamed block."""
    if blocks is None:
        selected = [(unit.name, unit.module) for unit in units_of(model) if unit.is_block]
    else:
        selected = [(name, model.get_submodule(name)) for name in blocks]
    unknown = sorted({*resident, *on_host} - {name for name, _ in selected})
    if unknown:
        raise ConfigError(
            f"unknown blocks: {', '.join(unknown)} (blocks of this {type(model).__name__}: "
            f"{', '.join(name for name, _ in selected)})."
        )
    selected = [(name, module) for name, module in selected if name not in resident]
    if not selected:
        raise ConfigError(
            f"{type(model).__name__} has no repeated blocks to stream. Name the modules to stream "
            "with blocks, or load the model without streaming."
        )
    return selected


class _Streamed:
    """Reads the values of a streamed parameter with the `read` function of its streamer."""

    is_on_disk = True

    def __init__(self, streamer: Streamer, name: str, dtype: torch.dtype) -> None:
        # The parameter's metadata must not keep the streamer, with its slots and thread, alive.
        self._streamer, self._name, self.dtype = weakref.ref(streamer), name, dtype

    def fill(self, target: Tensor) -> None:
        streamer = self._streamer()
        assert streamer is not None, f"{self._name} was used after its source was closed"
        streamer.read(self._name, target)

    def put(self, start: int, values: Tensor) -> None:
        raise AssertionError(f"{self._name} is streamed from its file and read-only.")

"""Layer streaming: blocks whose weights do not fit live elsewhere and come one ahead of their use.

Two blocks are on the device: the one that computes and the one that comes next, in forward and, in
the other order, in backward. Blocks are recomputed in backward, so everything a backward reads was
made from weights that are there. The same streamer serves training and inference.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.device import is_host
from bmforge.errors import ConfigError
from bmforge.memory.copies import CopyEngine, Ticket, make_copy_engine
from bmforge.memory.recompute import apply_recompute_
from bmforge.records import note_, record_of, units_of
from bmforge.shards import local_tensor
from bmforge.surgery import persistent_tensors, wrap_forward_

__all__ = ["ReadWeights", "Streamer", "stream_blocks_"]

ReadWeights = Callable[[str, Tensor], None]
"""Fills a contiguous host tensor with the values of the parameter of that name."""

_ALIGN_BYTES = 64


class _Slot:
    """Room for one block on the device, and where its bytes arrive on the host.

    Args:
        size_bytes: of the largest block.
        device: where it computes.
        engine: copies.
    """

    def __init__(self, size_bytes: int, device: torch.device, engine: CopyEngine) -> None:
        self.host = engine.new_host((size_bytes,), torch.uint8)
        self.memory = self.host
        if not is_host(device):
            self.memory = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self.block: int | None = None
        self.is_shown = False
        self.ticket: Ticket | None = None
        self.copied: Ticket | None = None


class _PackedBlock:
    """One block's parameters, and where each lies in a slot."""

    def __init__(self, prefix: str, module: nn.Module, parameters: dict[str, Tensor]) -> None:
        self.prefix, self.module, self.parameters = prefix, module, parameters
        self._stubs = {name: _make_stub(p) for name, p in parameters.items()}
        self.places: dict[str, tuple[int, int]] = {}
        self.size_bytes = 0
        for name, parameter in parameters.items():
            size = parameter.numel() * parameter.element_size()
            self.places[name] = self.size_bytes, self.size_bytes + size
            self.size_bytes += -(-size // _ALIGN_BYTES) * _ALIGN_BYTES

    def views(self, memory: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters' tensors in a slot's memory."""
        for name, (start, stop) in self.places.items():
            parameter = self.parameters[name]
            yield name, memory[start:stop].view(parameter.dtype).view(parameter.shape)

    def show(self, memory: Tensor) -> None:
        for name, view in self.views(memory):
            self.parameters[name].data = view

    def hide(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.data = self._stubs[name]


def _make_stub(parameter: Tensor) -> Tensor:
    """Return a tensor of the same shape and almost no memory; whoever computes with it gets NaN.

    Integers have none; they are what rows are packed in, whose scales are NaN then.
    """
    value = float("nan") if parameter.is_floating_point() else 0
    stub = torch.full((), value, dtype=parameter.dtype, device=parameter.device)
    return stub.expand(parameter.shape)


class Streamer:
    """Brings blocks to the device, each while the one before it computes.

    Args:
        blocks: name and module, in the order in which they run.
        read: where weights come from.
        device: where they are used.
        engine: copies; None makes one.
    """

    def __init__(
        self,
        blocks: Sequence[tuple[str, nn.Module]],
        read: ReadWeights,
        device: torch.device,
        engine: CopyEngine | None = None,
    ) -> None:
        self.read, self.device = read, device
        self.engine = engine or make_copy_engine(device, "bmforge-streaming")
        counts: dict[int, int] = {}
        for _, module in blocks:
            for parameter in persistent_tensors(module).values():
                counts[id(parameter)] = counts.get(id(parameter), 0) + 1
        self.blocks = [
            _PackedBlock(
                prefix,
                module,
                {
                    f"{prefix}.{name}": tensor
                    for name, tensor in persistent_tensors(module).items()
                    if counts[id(tensor)] == 1
                },
            )
            for prefix, module in blocks
        ]
        largest = max(block.size_bytes for block in self.blocks)
        self._slots = [_Slot(largest, device, self.engine) for _ in range(2)]
        for number, block in enumerate(self.blocks):
            block.hide()
            wrap_forward_(block.module, partial(self._run, number), "weights")

    @property
    def names(self) -> list[str]:
        """Names of the parameters that are streamed."""
        return [name for block in self.blocks for name in block.parameters]

    def forget(self) -> None:
        """Drop what is on the device: the weights have changed where they live."""
        for slot in self._slots:
            self._clear(slot)

    def close(self) -> None:
        """End the copying; the model cannot run any more."""
        self.forget()
        self.engine.close()

    def _run(self, number: int, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self._enter(number)
        return inner(*args, **kwargs)

    def _enter(self, number: int) -> None:
        """Have block `number` here, and the one that is needed next on its way."""
        slot = self._slot_of(number) or self._fetch(number, beside=None)
        if not slot.is_shown:
            self._arrive(slot)
            self.blocks[number].show(slot.memory)
            slot.is_shown = True
        self.engine.note("computes", f"block {number}")
        coming = self._next(number)
        if coming != number and self._slot_of(coming) is None:
            self._fetch(coming, beside=slot)

    def _next(self, number: int) -> int:
        """Return which comes after `number`: backward the one before, and at the ends they turn."""
        last = len(self.blocks) - 1
        is_backward = torch._C._current_graph_task_id() != -1
        if is_backward:
            return number - 1 if number else min(1, last)
        if number < last:
            return number + 1
        return max(0, last - 1) if torch.is_grad_enabled() else 0

    def _slot_of(self, number: int) -> _Slot | None:
        return next((slot for slot in self._slots if slot.block == number), None)

    def _fetch(self, number: int, beside: _Slot | None) -> _Slot:
        """Begin to bring a block into the slot that is not `beside`."""
        slot = next(slot for slot in self._slots if slot is not beside)
        self._clear(slot)
        slot.block = number
        block, before = self.blocks[number], slot.copied
        # What the slot held may still be computed with; what is asked for from now on may not.
        mark = self.engine.mark()

        def work() -> None:
            if before is not None:
                before.wait_on_host()  # the bytes before have left the host's part of the slot
            for name, view in block.views(slot.host):
                self.read(name, view)
            if slot.memory is not slot.host:
                label = f"copy block {number}"
                slot.copied = self.engine.copy_(slot.memory, slot.host, label, after=mark)

        slot.ticket = self.engine.run(work, f"read block {number}")
        return slot

    def _arrive(self, slot: _Slot) -> None:
        """Wait for a block that was asked for."""
        assert slot.ticket is not None
        slot.ticket.wait()
        slot.ticket = None
        if slot.copied is not None:
            slot.copied.wait()

    def _clear(self, slot: _Slot) -> None:
        if slot.ticket is not None:
            slot.ticket.wait()
            slot.ticket = None
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
) -> Streamer:
    """Have the weights of a model's blocks stream from elsewhere; the rest stays where it is.

    Call it before weights are given memory: on a model on meta, loading and drawing then leave the
    streamed ones out.

    Args:
        model: on meta, or plain.
        read: where weights come from, such as `models.weight_reader`.
        device: where blocks compute.
        blocks: names of the modules to stream, in the order in which they run; None takes all
            blocks that the model has.
        engine: copies; None makes one.

    Raises:
        ConfigError: nothing to stream, or a parameter is sharded.

    Memory: two blocks' weights on the device, and on an accelerator as much of locked host memory.
    """
    if blocks is None:
        found = [(unit.name, unit.module) for unit in units_of(model) if unit.is_block]
    else:
        found = [(name, model.get_submodule(name)) for name in blocks]
    if not found:
        raise ConfigError(f"{type(model).__name__} has no repeated blocks that could be streamed.")
    for name, module in found:
        for own, parameter in persistent_tensors(module).items():
            if local_tensor(parameter) is not parameter:
                raise ConfigError(
                    f"{name}.{own} is sharded over processes, which already keep a part of it "
                    "each: streaming is for one process. Leave one of the two out."
                )
            _give_device_(module, own, parameter, device)
    streamer = Streamer(found, read, device, engine)
    apply_recompute_([module for _, module in found])
    record_of(model).streamer = streamer
    for block in streamer.blocks:
        for name, parameter in block.parameters.items():
            note_(parameter, origin=_Streamed(streamer, name, parameter.dtype))
    return streamer


class _Streamed:
    """Keeps a parameter's values as far as others see: reads them where the streamer does."""

    is_on_disk = True

    def __init__(self, streamer: Streamer, name: str, dtype: torch.dtype) -> None:
        self._streamer, self._name, self.dtype = weakref.ref(streamer), name, dtype

    def fill(self, target: Tensor) -> None:
        streamer = self._streamer()
        assert streamer is not None, f"{self._name} outlived what it streams from"
        streamer.read(self._name, target)

    def put(self, start: int, values: Tensor) -> None:
        raise AssertionError(f"{self._name} is read from where it lives, not written")


def _give_device_(module: nn.Module, name: str, parameter: Tensor, device: torch.device) -> None:
    """Replace a tensor on meta by one that says it is on `device`, without memory."""
    if not parameter.is_meta:
        return
    owner, _, leaf = name.rpartition(".")
    described = torch.empty((), dtype=parameter.dtype, device=device).expand(parameter.shape)
    if isinstance(parameter, nn.Parameter):
        described = nn.Parameter(described, requires_grad=parameter.requires_grad)
    setattr(module.get_submodule(owner), leaf, described)

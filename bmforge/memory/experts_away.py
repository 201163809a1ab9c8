"""Experts that live elsewhere: what the router chose is read, and what was used last stays.

A layer of experts uses few of them for a token. All layers share some slots, each with room for
one expert; the one that was not used for longest gives way. Of what a layer needs, experts that are
here work first, while the others are read.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.memory.copies import CopyEngine, make_copy_engine
from bmforge.memory.packed import PackedBlock, Slot, give_device_, packed_bytes
from bmforge.records import note_
from bmforge.surgery import wrap_forward_

__all__ = [
    "LEAST_EXPERTS",
    "ExpertStreamer",
    "ReadExpert",
    "expert_bytes",
    "find_experts",
    "stream_experts_",
]

ReadExpert = Callable[[str, int, Tensor], None]
"""Fills a contiguous host tensor with one expert's part of the stacked parameter of that name."""

# One expert works while another is on its way.
LEAST_EXPERTS = 2


class _Key(NamedTuple):
    """An expert: its layer's number among the layers with experts, and its own."""

    layer: int
    expert: int


class _Layer(NamedTuple):
    """A layer of experts: its name, and the same with one expert, whose memory is set."""

    name: str
    one: PackedBlock


def expert_bytes(experts: nn.Module) -> int:
    """Return what one expert of a layer takes of a slot."""
    return sum(packed_bytes(parameter[0]) for parameter in experts.parameters())


def find_experts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return name and module of a model's layers of experts, which are called `experts`."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "experts" and any(True for _ in module.parameters())
    ]


class ExpertStreamer:
    """Brings experts to the device when they are chosen.

    Args:
        layers: name and module of every layer of experts; each parameter is stacked by expert, and
            `module(rows sorted by expert, where each one's end)` returns as many rows.
        read: where they come from.
        device: where they are used.
        budget_bytes: of all slots.
        engine: copies; None makes one.

    Attributes:
        read_bytes: read so far.

    Raises:
        ConfigError: the budget has no room for two experts.
    """

    def __init__(
        self,
        layers: Sequence[tuple[str, nn.Module]],
        read: ReadExpert,
        device: torch.device,
        budget_bytes: int,
        engine: CopyEngine | None = None,
    ) -> None:
        self.read, self.read_bytes = read, 0
        largest = max(expert_bytes(module) for _, module in layers)
        count = min(budget_bytes // largest, sum(_count(module) for _, module in layers))
        if count < LEAST_EXPERTS:
            raise ConfigError(
                f"budget_bytes={budget_bytes} has no room for two experts of {largest} bytes each: "
                f"at least {LEAST_EXPERTS * largest} are needed."
            )
        self.engine = engine or make_copy_engine(device, "bmforge-experts")
        self._free = [Slot(largest, device, self.engine) for _ in range(count)]
        self._here: OrderedDict[_Key, Slot] = OrderedDict()  # the longest unused first
        self._layers: list[_Layer] = []
        for number, (name, module) in enumerate(layers):
            for key, parameter in dict(module.named_parameters()).items():
                give_device_(module, key, parameter, device)
            one = _shrink(module, device)
            parameters = dict(one.named_parameters())
            self._layers.append(_Layer(name, PackedBlock(name, one, parameters, device)))
            whole = {f"{name}.{key}": tensor for key, tensor in module.named_parameters()}
            PackedBlock(name, module, whole, device).hide()
            for key, tensor in whole.items():
                note_(tensor, origin=_Away(self, key, tensor))
            wrap_forward_(module, partial(self._run, number), "weights")

    @property
    def num_slots(self) -> int:
        """How many experts have room."""
        return len(self._free) + len(self._here)

    def close(self) -> None:
        """End the copying; the model cannot run any more."""
        for slot in self._here.values():
            if slot.ticket is not None:
                slot.ticket.settle()
        self.engine.close()

    def _run(self, layer: int, inner: Any, /, x: Tensor, ends: Tensor) -> Tensor:
        """Let experts work on their rows, those that are here first."""
        if torch.is_grad_enabled() and x.requires_grad:
            raise ConfigError(
                "experts that are read when they are chosen have no backward. Stream whole blocks "
                "(stream_blocks_), or switch gradients off."
            )
        rows = list(_rows_of(ends))
        found = [expert for expert, (start, stop) in enumerate(rows) if stop > start]
        order = sorted(found, key=lambda expert: _Key(layer, expert) not in self._here)
        parts: dict[int, Tensor] = {}
        for place, expert in enumerate(order):
            wanted = [_Key(layer, e) for e in order[place : place + self.num_slots]]
            self._ask_for(wanted)
            start, stop = rows[expert]
            parts[expert] = self._work(wanted[0], x[start:stop])
        return torch.cat([parts[expert] for expert in found]) if found else x[:0]

    def _work(self, key: _Key, x: Tensor) -> Tensor:
        """Run one expert, which has been asked for."""
        slot = self._here[key]
        self._here.move_to_end(key)
        if slot.ticket is not None:
            ticket, slot.ticket = slot.ticket, None
            try:
                ticket.wait()
            except BaseException:
                self._free.append(self._here.pop(key))
                self._drop_pending()
                raise
            if slot.copied is not None:
                slot.copied.wait()
        one = self._layers[key.layer].one
        self.engine.note("computes", f"expert {key.layer}.{key.expert}")
        one.show(slot.memory)
        try:
            return one.module(x, torch.tensor([x.shape[0]], device=x.device))
        finally:
            one.hide()

    def _drop_pending(self) -> None:
        """Let go of what was asked for with the one that failed; who needs it asks anew."""
        for key in [key for key, slot in self._here.items() if slot.ticket is not None]:
            slot = self._here.pop(key)
            assert slot.ticket is not None
            slot.ticket.settle()
            slot.ticket = None
            self._free.append(slot)

    def _ask_for(self, wanted: Sequence[_Key]) -> None:
        """Begin to bring experts that are not here, in place of those that are not wanted."""
        for key in wanted:
            if key not in self._here:
                if not self._free:
                    oldest = next(k for k in self._here if k not in wanted)
                    self._free.append(self._here.pop(oldest))
                self._fetch(key, self._free.pop())

    def _fetch(self, key: _Key, slot: Slot) -> None:
        if slot.ticket is not None:
            slot.ticket.settle()
        layer, before, mark = self._layers[key.layer], slot.copied, self.engine.mark()

        def work() -> None:
            if before is not None:
                before.wait_on_host()  # the bytes before have left the host's part of the slot
            for name, view in layer.one.views(slot.host):
                self.read(f"{layer.name}.{name}", key.expert, view[0])
                self.read_bytes += view.numel() * view.element_size()
            if slot.memory is not slot.host:
                label = f"copy expert {key.layer}.{key.expert}"
                slot.copied = self.engine.copy_(slot.memory, slot.host, label, after=mark)

        slot.ticket = self.engine.run(work, f"read expert {key.layer}.{key.expert}")
        self._here[key] = slot


def _count(experts: nn.Module) -> int:
    return next(experts.parameters()).shape[0]


def _rows_of(ends: Tensor) -> Iterator[tuple[int, int]]:
    """Yield where each expert's rows begin and end."""
    start = 0
    for stop in ends.tolist():
        yield start, stop
        start = stop


def _shrink(experts: nn.Module, device: torch.device) -> nn.Module:
    """Return the same layer with one expert and almost no memory."""
    memo: dict[int, Any] = {}
    for tensor in experts.parameters():
        one = torch.empty((), dtype=tensor.dtype, device=device).expand(1, *tensor.shape[1:])
        memo[id(tensor)] = nn.Parameter(one, requires_grad=False)
    return copy.deepcopy(experts, memo)


class _Away:
    """Keeps a stacked parameter's values as far as others see: reads them expert by expert."""

    is_on_disk = True

    def __init__(self, streamer: ExpertStreamer, name: str, tensor: Tensor) -> None:
        self._streamer, self._name, self.dtype = weakref.ref(streamer), name, tensor.dtype

    def fill(self, target: Tensor) -> None:
        streamer = self._streamer()
        assert streamer is not None, f"{self._name} outlived what it streams from"
        for expert, part in enumerate(target):
            streamer.read(self._name, expert, part)

    def put(self, start: int, values: Tensor) -> None:
        raise AssertionError(f"{self._name} is read from where it lives, not written")


def stream_experts_(
    model: nn.Module,
    read: ReadExpert,
    *,
    device: torch.device,
    budget_bytes: int,
    engine: CopyEngine | None = None,
) -> ExpertStreamer:
    """Have a model's experts read when they are chosen; the rest stays where it is.

    Call it before weights are given memory: on a model on meta, loading then leaves experts out.

    Args:
        model: on meta, or plain; its layers of experts are called `experts`.
        read: where experts come from, such as `models.weight_reader(...).read_expert`.
        device: where they work.
        budget_bytes: of the experts that are on the device at once.
        engine: copies; None makes one.

    Raises:
        ConfigError: the model has no experts, or the budget no room for two.
    """
    found = find_experts(model)
    if not found:
        raise ConfigError(f"{type(model).__name__} has no layer of experts.")
    return ExpertStreamer(found, read, device, budget_bytes, engine)

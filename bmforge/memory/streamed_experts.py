"""Expert streaming: experts are read when the router selects them, and cached on the device.

An MoE layer uses few experts per token. All layers share one cache of slots, each of which holds
one expert; the least recently used expert is evicted. Cached experts compute first, while the
missing ones are read.
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
from bmforge.memory.packed import PackedBlock, Slot, packed_bytes, replace_with_stub_
from bmforge.records import set_metadata_
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
"""Function (parameter name, expert, target) that reads one expert of a stacked parameter."""

# Double buffering: one expert computes while the next is copied.
LEAST_EXPERTS = 2


class _Key(NamedTuple):
    """Identifies an expert by the index of its MoE layer and its index within that layer."""

    layer: int
    expert: int


class _Layer(NamedTuple):
    """Name of an MoE layer, and a copy with one expert whose weights view a cache slot."""

    name: str
    single: PackedBlock


def expert_bytes(experts: nn.Module) -> int:
    """Return the size of one expert of a layer in a cache slot, in bytes."""
    return sum(packed_bytes(parameter[0]) for parameter in experts.parameters())


def find_experts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the name and module of every MoE layer, which are the modules named `experts`."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "experts" and any(True for _ in module.parameters())
    ]


class ExpertStreamer:
    """Copies experts to the device when the router selects them.

    Args:
        layers: name and module of every MoE layer. Each parameter is stacked by expert. The
            module's arguments are the tokens' hidden states, sorted by expert, and the end index
            of each expert's tokens; it returns one output per token.
        read: reader of the weights.
        device: compute device.
        budget_bytes: total size of the slots.
        engine: copy engine; if None, one is created.

    Attributes:
        read_bytes: number of bytes read so far.

    Raises:
        ConfigError: the budget is too small for two experts.
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
        # More slots than experts would never be used.
        count = min(budget_bytes // largest, sum(_count(module) for _, module in layers))
        if count < LEAST_EXPERTS:
            raise ConfigError(
                f"budget_bytes={budget_bytes} is too small for two experts of {largest} bytes "
                f"each (needed: at least {LEAST_EXPERTS * largest}). Raise budget_bytes."
            )
        self.engine = engine or make_copy_engine(device, "bmforge-experts")
        self._free = [Slot(largest, device, self.engine) for _ in range(count)]
        self._here: OrderedDict[_Key, Slot] = OrderedDict()  # least recently used first
        self._layers: list[_Layer] = []
        for number, (name, module) in enumerate(layers):
            for key, parameter in dict(module.named_parameters()).items():
                replace_with_stub_(module, key, parameter, device)
            template = _shrink(module, device)
            parameters = dict(template.named_parameters())
            self._layers.append(_Layer(name, PackedBlock(name, template, parameters, device)))
            weights = {f"{name}.{key}": tensor for key, tensor in module.named_parameters()}
            PackedBlock(name, module, weights, device).hide()
            for key, tensor in weights.items():
                set_metadata_(tensor, origin=_StreamedExperts(self, key, tensor))
            wrap_forward_(module, partial(self._run, number), "weights")

    @property
    def num_slots(self) -> int:
        """Number of experts that the cache can hold."""
        return len(self._free) + len(self._here)

    def close(self) -> None:
        """Stop the copy engine; the model cannot run afterwards."""
        for slot in self._here.values():
            if slot.ticket is not None:
                slot.ticket.settle()
        self.engine.close()

    def _run(self, layer: int, inner: Any, /, x: Tensor, ends: Tensor) -> Tensor:
        """Apply each expert to its tokens, beginning with the cached experts."""
        if torch.is_grad_enabled() and x.requires_grad:
            raise ConfigError(
                "streamed experts do not support the backward pass. Stream whole blocks "
                "(stream_blocks_), or disable gradients."
            )
        rows = list(_rows_of(ends))
        used = [expert for expert, (start, stop) in enumerate(rows) if stop > start]
        # Cached experts first: the reads of the missing ones overlap with their products.
        order = sorted(used, key=lambda expert: _Key(layer, expert) not in self._here)
        parts: dict[int, Tensor] = {}
        for index, expert in enumerate(order):
            # As many as there are slots, so that an eviction always finds an expert outside of this
            # list.
            upcoming = [_Key(layer, e) for e in order[index : index + self.num_slots]]
            self._request(upcoming)
            start, stop = rows[expert]
            parts[expert] = self._work(upcoming[0], x[start:stop])
        # Computed in another order, but joined in the order of the tokens, which are sorted by
        # expert.
        return torch.cat([parts[expert] for expert in used]) if used else x[:0]

    def _work(self, key: _Key, x: Tensor) -> Tensor:
        """Apply one expert to its tokens; wait for its weights if they are being read."""
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
        single = self._layers[key.layer].single
        self.engine.note("computes", f"expert {key.layer}.{key.expert}")
        single.show(slot.memory)
        try:
            return single.module(x, torch.tensor([x.shape[0]], device=x.device))
        finally:
            # The next expert of the layer uses the same module with another slot.
            single.hide()

    def _drop_pending(self) -> None:
        """After an error, discard the experts whose reads are pending, so that they are reread."""
        for key in [key for key, slot in self._here.items() if slot.ticket is not None]:
            slot = self._here.pop(key)
            assert slot.ticket is not None
            slot.ticket.settle()
            slot.ticket = None
            self._free.append(slot)

    def _request(self, keys: Sequence[_Key]) -> None:
        """Start reading missing experts into the slots of experts that this call does not need."""
        for key in keys:
            if key not in self._here:
                if not self._free:
                    oldest = next(k for k in self._here if k not in keys)
                    self._free.append(self._here.pop(oldest))
                self._fetch(key, self._free.pop())

    def _fetch(self, key: _Key, slot: Slot) -> None:
        if slot.ticket is not None:
            slot.ticket.settle()
        # The mark lets the copy wait for products that still read the evicted expert; the settled
        # ticket above makes `slot.copied` final.
        layer, before, mark = self._layers[key.layer], slot.copied, self.engine.mark()

        def work() -> None:
            if before is not None:
                before.wait_on_host()  # the previous copy out of the slot's host buffer is done
            for name, view in layer.single.views(slot.host):
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
    """Yield the range (start, stop) of each expert's tokens."""
    start = 0
    for stop in ends.tolist():
        yield start, stop
        start = stop


def _shrink(experts: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of the layer with a single expert, which takes almost no memory."""
    memo: dict[int, Any] = {}
    for tensor in experts.parameters():
        placeholder = torch.empty((), dtype=tensor.dtype, device=device).expand(
            1, *tensor.shape[1:]
        )
        memo[id(tensor)] = nn.Parameter(placeholder, requires_grad=False)
    return copy.deepcopy(experts, memo)


class _StreamedExperts:
    """Reads the values of a stacked parameter whose experts are streamed, one expert at a time."""

    is_on_disk = True

    def __init__(self, streamer: ExpertStreamer, name: str, tensor: Tensor) -> None:
        self._streamer, self._name, self.dtype = weakref.ref(streamer), name, tensor.dtype

    def fill(self, target: Tensor) -> None:
        streamer = self._streamer()
        assert streamer is not None, f"{self._name} was used after its source was closed"
        for expert, part in enumerate(target):
            streamer.read(self._name, expert, part)

    def put(self, start: int, values: Tensor) -> None:
        raise AssertionError(f"{self._name} is streamed from its file and read-only.")


def stream_experts_(
    model: nn.Module,
    read: ReadExpert,
    *,
    device: torch.device,
    budget_bytes: int,
    engine: CopyEngine | None = None,
) -> ExpertStreamer:
    """Stream a model's experts when the router selects them; other weights are not streamed.

    Call this while the model is on the meta device: loading its weights then skips the experts.

    Args:
        model: model, possibly on the meta device, whose MoE layers are named `experts`.
        read: function that reads experts, such as `models.weight_reader(...).read_expert`.
        device: compute device.
        budget_bytes: size of the expert cache on the device.
        engine: copy engine; if None, one is created.

    Raises:
        ConfigError: the model has no experts, or the budget is too small for two experts.
    """
    layers = find_experts(model)
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} has no MoE layers, so no experts can be streamed. Stream its "
            "blocks with stream_blocks_."
        )
    return ExpertStreamer(layers, read, device, budget_bytes, engine)

"""Offload of optimizer state: selection of parameters, destination, and memory checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from bmforge.device import accumulation_dtype, is_host, memory_room_bytes
from bmforge.errors import ConfigError
from bmforge.logging import get_logger
from bmforge.memory.copies import CopyEngine, make_copy_engine
from bmforge.memory.gradients import CopyLimit, OffloadedGradient, wait_before_use
from bmforge.memory.offload import OffloadConfig, check_host_memory, choose_parameters
from bmforge.memory.spill import SpillFile, format_bytes
from bmforge.memory.state_storage import StateStorage, storage_bytes
from bmforge.parallel import pipeline_of, reshard_, run_everywhere
from bmforge.parallel.zero import change_dtype_, half_units
from bmforge.records import find_parallel_record, set_metadata_
from bmforge.shards import is_streamed, local_tensor, source_of
from bmforge.train.offload.optimizers import OffloadedAdamW, OffloadedMuon, OffloadedParameter

__all__ = ["StateOffload"]

# Name of an optimizer state -> True if its values may be negative.
_STATES: dict[type[Optimizer], dict[str, bool]] = {
    OffloadedAdamW: {"exp_avg": True, "exp_avg_sq": False},
    OffloadedMuon: {"momentum_buffer": True},
}
# Minimum buffer size in bytes for gradients in transfer, even for small models.
_SMALLEST_BACKLOG_BYTES = 64 << 20


class StateOffload:
    """Selects parameters and offloads their optimizer state.

    Args:
        model: parallelized and materialized model.
        optimizers: optimizers built by ``build_optimizers(..., offloaded=True)``.
        config: offload settings.

    Raises:
        ConfigError: an optimizer cannot be offloaded, or host or disk space is too small; the same
            on every process.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], config: OffloadConfig
    ) -> None:
        self.config, self._model = config, model
        self._homes: dict[int, tuple[OffloadedAdamW | OffloadedMuon, dict[str, bool]]] = {}
        for optimizer in optimizers:
            self._note(optimizer)
        reshard_(model)
        self._parameters = [p for p in model.parameters() if id(p) in self._homes]
        _refuse_narrow(model, self._parameters)
        # A pipeline stage may have no trained parameters.
        self._device = local_tensor(next(iter(self._parameters or model.parameters()))).device
        self._away: dict[int, OffloadedParameter] = {}
        self._leaves = config.leaves(self._device) or bool(_streamers_of(model))
        self._narrow: set[int] = set()
        self._hooks: list[RemovableHandle] = []
        self._disk: SpillFile | None = None
        self.engine: CopyEngine = make_copy_engine(self._device, "bmforge-offload")
        self.is_settled = False
        if config.fraction != "auto":
            self._send(config.fraction)
            return
        for optimizer in self._optimizers():
            optimizer.is_waiting = True

    def _note(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, (OffloadedAdamW, OffloadedMuon)):
            raise ConfigError(
                f"{type(optimizer).__name__} cannot be offloaded (supported: adamw, muon). Set "
                "offload.fraction=0 or another optim.name."
            )
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._homes[id(parameter)] = (optimizer, _STATES[type(optimizer)])

    def settle(self) -> None:
        """With fraction "auto", offload the states that do not fit; called before the first update.

        By then, a forward and a backward pass have run, so the peak memory use is known.
        """
        if self.is_settled:
            return
        total = sum(self._state_bytes(p, everywhere=False) for p in self._parameters)
        room = memory_room_bytes(self._device)
        excess = 1.0 - room / total if total else 0.0
        fraction = torch.tensor(min(1.0, max(0.0, excess)))
        if dist.is_initialized() and dist.get_world_size() > 1:
            fraction = fraction.to(self._device)
            # All processes must offload the same parameters, so the device with the least room
            # decides.
            dist.all_reduce(fraction, op=dist.ReduceOp.MAX)
        get_logger().info(
            "offload: the optimizer states need %s, and the device has %s of free memory for them",
            format_bytes(total),
            format_bytes(max(0, room)),
        )
        self._send(fraction.item())

    def wait(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Wait until the given parameters, or all of them, contain the last update."""
        if parameters is None:
            for offloaded in self._away.values():
                offloaded.wait()
            return
        for parameter in parameters:
            waited = self._away.get(id(parameter))
            if waited is not None:
                waited.wait()

    @torch.no_grad()
    def restore_(self) -> None:
        """At the end of a run, finish the last update and restore the parameters' full dtype.

        The optimizers cannot be used afterwards.
        """
        self.wait()
        reshard_(self._model)
        for offloaded in self._away.values():
            if offloaded.gradient is not None:
                offloaded.gradient.close()
                offloaded.gradient = None
        change_dtype_(self._model, self._narrow, torch.float32)
        for key, offloaded in self._away.items():
            if offloaded.master is None or is_streamed(offloaded.parameter):
                continue
            if key in self._narrow:
                local = local_tensor(offloaded.parameter)
                local.copy_(offloaded.master.fetch().view(local.shape))
            set_metadata_(offloaded.parameter, master=None)
            offloaded.master = None
        self._narrow = set()
        while self._hooks:
            self._hooks.pop().remove()

    def close(self) -> None:
        """Release the disk space and the thread; streamed parameters cannot be read afterwards."""
        self.restore_()
        self.engine.close()
        if self._disk is not None:
            self._disk.close()

    def _send(self, fraction: float) -> None:
        self.is_settled = True
        chosen = choose_parameters(self._parameters, fraction)
        chosen |= {id(p) for p in self._parameters if is_streamed(p)}
        moved = [p for p in self._parameters if id(p) in chosen]
        self._narrow = self._find_narrow(chosen)
        needed = sum(self._state_bytes(p, everywhere=True) for p in moved)
        run_everywhere(lambda: self._make_room(needed, moved))
        for order, parameter in enumerate(self._parameters):
            if id(parameter) in chosen:
                self._away[id(parameter)] = self._send_one(order, parameter)
        for key in self._narrow:
            gradient = self._away[key].parameter.grad  # changing the dtype would drop the gradient
            self._away[key].early_gradient = (
                None if gradient is None else local_tensor(gradient).detach()
            )
        change_dtype_(self._model, self._narrow, torch.bfloat16)
        if self._leaves and self._away:
            self._let_gradients_leave()
        for optimizer in self._optimizers():
            parameter_ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
            optimizer.send_away(
                offloaded for key, offloaded in self._away.items() if key in parameter_ids
            )
        self._take_over_streaming()
        if self._away:
            self._hooks = wait_before_use(self._model, self.wait)
        get_logger().info(
            "offload: the states of %d of %d parameters, %s, are stored on the %s",
            len(moved),
            len(self._parameters),
            format_bytes(needed),
            self.config.target,
        )

    def _optimizers(self) -> list[OffloadedAdamW | OffloadedMuon]:
        return list({id(o): o for o, _ in self._homes.values()}.values())

    def _make_room(self, needed: int, moved: Sequence[nn.Parameter]) -> None:
        if self.config.target == "disk":
            self._disk = SpillFile(self.config.directory, needed)
            needed = 0
        if self._leaves:
            # Buffer that receives gradients, and buffer that accumulates them over micro-batches.
            needed += sum(8 * local_tensor(p).numel() for p in moved if not is_streamed(p))
        check_host_memory(needed)

    def _send_one(self, order: int, parameter: nn.Parameter) -> OffloadedParameter:
        local = local_tensor(parameter.detach())
        _, states = self._homes[id(parameter)]
        storages = {name: self._home(local, signed) for name, signed in states.items()}
        offloaded = OffloadedParameter(parameter, order, self.engine, storages)
        if self._has_master(parameter):
            offloaded.master = StateStorage(
                local.numel(), dtype=accumulation_dtype(local.dtype), disk=self._disk
            )
            offloaded.master.put(0, source_of(parameter).read())
            set_metadata_(parameter, master=offloaded.master)
        return offloaded

    def _has_master(self, parameter: Tensor) -> bool:
        """Return True if the optimizer updates an fp32 master copy instead of the parameter itself.

        This holds for parameters on an accelerator, streamed parameters, and parameters that were
        converted to bf16.
        """
        elsewhere = id(parameter) in self._narrow or is_streamed(parameter)
        return elsewhere or not is_host(local_tensor(parameter).device)

    def _take_over_streaming(self) -> None:
        """Make streamed blocks read their weights from the master copies."""
        named = {name: self._away.get(id(p)) for name, p in self._model.named_parameters()}
        for streamer in _streamers_of(self._model):
            streamer.forget()
            streamer.read = partial(_read_stepped, named, streamer.read)
            for name in streamer.names:
                if (offloaded := named.get(name)) is not None:
                    offloaded.changed = streamer.forget

    def _find_narrow(self, chosen: set[int]) -> set[int]:
        """Return the ids of parameters whose copy on the device is bfloat16 instead of fp32.

        These are the parameters of FSDP units that compute in bfloat16, if all of the unit is
        offloaded. Their gradients must be offloaded too, because on the device they would be
        accumulated in bfloat16.
        """
        if not self._leaves:
            return set()
        units = half_units(self._model, torch.bfloat16)
        ids = ({id(p) for p in unit} for unit in units)
        return {key for unit in ids if unit <= chosen for key in unit}

    def _let_gradients_leave(self) -> None:
        late = self._find_shared_by_stages()
        largest = max(
            local_tensor(offloaded.parameter).numel() for offloaded in self._away.values()
        )
        self._backlog = CopyLimit(max(_SMALLEST_BACKLOG_BYTES, 8 * largest))
        for key, offloaded in self._away.items():
            if key not in late:
                label = f"parameter {offloaded.order}"
                disk = self._disk if is_streamed(offloaded.parameter) else None
                offloaded.gradient = OffloadedGradient(
                    offloaded.parameter, self.engine, self._backlog, disk, label
                )

    def _home(self, local: Tensor, signed: bool) -> StateStorage:
        kind = self.config.states
        return StateStorage(
            local.numel(),
            kind,
            dtype=accumulation_dtype(local.dtype),
            disk=self._disk,
            signed=signed,
        )

    def _state_bytes(self, parameter: Tensor, everywhere: bool) -> int:
        """Return the bytes of a parameter's states on the device or, if `everywhere`, offloaded."""
        local = local_tensor(parameter)
        count, width = len(self._homes[id(parameter)][1]), accumulation_dtype(local.dtype)
        if not everywhere:
            return count * local.numel() * width.itemsize
        sizes = [storage_bytes(local.numel(), self.config.states, width)] * count
        if self._has_master(parameter):
            sizes.append(storage_bytes(local.numel(), "fp32", width))
        if is_streamed(parameter):
            sizes.append(storage_bytes(local.numel(), "fp32", width))  # gradient
        return sum(SpillFile.rounded(size) for size in sizes)

    def _find_shared_by_stages(self) -> set[int]:
        """Return the ids of parameters that several pipeline stages share.

        Their gradients are complete only when the stages have summed them after the backward pass.
        """
        pipeline = pipeline_of(self._model)
        named = dict(self._model.named_parameters())
        return set() if pipeline is None else {id(named[n]) for n in pipeline.shared_names}


def _refuse_narrow(model: nn.Module, parameters: Sequence[Tensor]) -> None:
    """Raise an error for 16-bit parameters, because offloading needs fp32 parameters."""
    offloaded_ids = {id(p) for p in parameters}
    narrow = [
        n
        for n, p in model.named_parameters()
        if id(p) in offloaded_ids and p.dtype != accumulation_dtype(p.dtype)
    ]
    if narrow:
        raise ConfigError(
            f"offloading needs fp32 parameters, but {len(narrow)} have another dtype, such as "
            f"{narrow[0]}. Load the model in fp32 and set train.precision=bf16: the device then "
            "keeps bf16 copies."
        )


def _streamers_of(model: nn.Module) -> tuple[Any, ...]:
    """Return the objects that stream a model's blocks; () if its weights are not streamed."""
    record = find_parallel_record(model)
    return () if record is None else record.streamers


def _read_stepped(
    named: Mapping[str, Any], before: Callable[[str, Tensor], None], name: str, target: Tensor
) -> None:
    """Fill `target` with a parameter's updated value, or with its original value if frozen."""
    offloaded = named.get(name)
    if offloaded is None or offloaded.master is None:
        before(name, target)
        return
    offloaded.wait()
    offloaded.master.fill(target)

"""AdamW and Muon with offloaded optimizer state: same results, less device memory.

Offloaded parameters are updated in a thread, in the order of the model, while the device continues;
each module waits for its parameters before its next forward pass. Muon's updates run synchronously
in the step, because gathering a matrix is collective; the next matrix's momentum is prefetched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.device import is_host
from bmforge.memory.copies import CopyEngine, CopyHandle
from bmforge.memory.gradients import Gradient, OffloadedGradient, offloaded_gradient
from bmforge.memory.state_storage import StateStorage
from bmforge.shards import is_streamed, local_tensor, shard_like
from bmforge.train.optim.adam_kernel import load_adam_kernel, step_plain
from bmforge.train.optim.muon import Muon, update_

__all__ = ["OffloadedParameter", "OffloadedAdamW", "OffloadedMuon"]

# Number of elements that are updated at a time, which limits the size of buffers for disk reads and
# upcasts.
_CHUNK_ELEMENTS = 1 << 20
Group = dict[str, Any]


@dataclass
class OffloadedParameter:
    """A parameter whose optimizer state is offloaded.

    Args:
        parameter: parameter of the model.
        order: index of the parameter in the model.
        engine: copy engine, whose thread also runs the updates.
        storages: dict from the name of an optimizer state to its storage.
        master: fp32 master weights if the parameter has a narrower dtype.
        steps: number of updates so far.
        gradient: offloaded gradient, if gradients are offloaded during backward.
        pending_copies: handles of the last step's copies to the device.
        changed: callback at the beginning of a step, if any.
        early_gradient: gradient of the current step, if it was computed before the parameter was
            offloaded as bf16, which would discard it.
    """

    parameter: nn.Parameter
    order: int
    engine: CopyEngine
    storages: dict[str, StateStorage]
    master: StateStorage | None = None
    steps: int = 0
    gradient: OffloadedGradient | None = None
    pending_copies: list[CopyHandle] = field(default_factory=list)
    changed: Callable[[], None] | None = None
    early_gradient: Tensor | None = None

    def wait(self) -> None:
        """Wait until the weights contain the last update; may be called from any thread.

        The host waits, not a device stream, since weights may be gathered on a separate stream.
        """
        number = 0
        while number < len(self.pending_copies):  # a finished update may have appended its copies
            self.pending_copies[number].wait_on_host()
            number += 1

    def begin_step(self) -> None:
        """Wait for the previous update and increment the number of updates."""
        self.wait()
        self.pending_copies.clear()
        self.steps += 1
        if self.changed is not None:
            self.changed()

    def take_gradient(self) -> Gradient | None:
        """Return the gradient of the step; None if the parameter has none."""
        left = offloaded_gradient(self.parameter)
        if left is not None:
            return left.take()
        gradient, self.early_gradient = self.early_gradient, None
        if gradient is None:
            if self.parameter.grad is None:
                return None
            gradient = local_tensor(self.parameter.grad).detach()
            self.parameter.grad = None
        if not is_host(gradient.device):
            staging = self.engine.new_host(tuple(gradient.shape), gradient.dtype)
            self.engine.copy_(staging, gradient, "gradient").wait_on_host()
            gradient = staging
        flat = gradient.reshape(-1)
        dtype = next(iter(self.storages.values())).dtype
        return Gradient(lambda start, stop: flat[start:stop], dtype)

    def weights(self, start: int, stop: int) -> Tensor:
        """Return weights `start` to `stop` - 1, from the master copy if there is one."""
        if self.master is not None:
            return self.master.fetch(start, stop)
        return local_tensor(self.parameter.detach()).view(-1)[start:stop]

    def new_narrow(self, count: int) -> Tensor | None:
        """Return a host buffer for updated bf16 weights; None if no bf16 copy is needed."""
        wants = self.master is not None and self.parameter.dtype == torch.bfloat16
        return self.engine.new_host((count,), torch.bfloat16) if wants else None

    def put_weights(
        self, start: int, values: Tensor, narrow: Tensor | None = None
    ) -> CopyHandle | None:
        """Write updated weights to the master and the parameter; return a pending copy's handle.

        Args:
            start: index of the first weight.
            values: updated weights in the dtype of the update.
            narrow: the same weights in the parameter's dtype, if available.
        """
        if self.master is None:
            return None
        self.master.put(start, values)
        if is_streamed(self.parameter):
            return None
        target = local_tensor(self.parameter.detach()).view(-1)[start : start + values.numel()]
        if is_host(target.device):
            target.copy_(values if narrow is None else narrow)
            return None
        if narrow is None:
            narrow = self.engine.new_host(tuple(values.shape), target.dtype).copy_(values)
        return self.engine.copy_(target, narrow, "weights")


class _OffloadingOptimizer:
    """Base class of `OffloadedAdamW` and `OffloadedMuon`: saves and restores offloaded state."""

    away: dict[int, OffloadedParameter]
    state: Any
    # State from a checkpoint is kept on the host until it is decided which parameters are
    # offloaded.
    is_waiting: bool
    waiting: dict[Tensor, dict[str, Any]]

    def send_away(self, parameters: Iterable[OffloadedParameter]) -> None:
        """Register offloaded parameters, and offload the states loaded from a checkpoint."""
        for offloaded in parameters:
            self.away[id(offloaded.parameter)] = offloaded
        self.is_waiting = False
        for parameter, values in self.waiting.items():
            self.write_state(
                parameter, {k: _like_parameter(parameter, v) for k, v in values.items()}
            )
        self.waiting.clear()

    def read_state(self, parameter: Tensor) -> dict[str, Any]:
        """Return a parameter's state: a dict of tensors, or of storages if it is offloaded."""
        offloaded = self.away.get(id(parameter))
        if parameter in self.waiting:
            values = self.waiting[parameter]
            return {name: _like_parameter(parameter, value) for name, value in values.items()}
        if offloaded is None:
            return self.state.get(parameter, {})
        offloaded.wait()
        if not offloaded.steps:
            return {}
        return {**self._counted(offloaded), **offloaded.storages}

    def write_state(self, parameter: Tensor, values: dict[str, Any]) -> None:
        """Set a parameter's state from a checkpoint."""
        if self.is_waiting:
            self.waiting[parameter] = {
                name: _to_host_shard(value) for name, value in values.items()
            }
            return
        offloaded = self.away.get(id(parameter))
        if offloaded is None:
            self.state[parameter] = values
            return
        offloaded.wait()
        offloaded.steps = int(values.get("step", 1)) if values else 0  # empty: never updated
        for name, home in offloaded.storages.items():
            if values:
                home.put(0, local_tensor(values[name]).to(home.dtype).cpu())
            else:
                home.clear()

    def _counted(self, offloaded: OffloadedParameter) -> dict[str, Any]:
        return {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, including offloaded ones."""
        for offloaded in self.away.values():
            offloaded.early_gradient = None
            if offloaded.gradient is not None:
                offloaded.gradient.clear()
        super().zero_grad(set_to_none)  # type: ignore[misc]


def _to_host_shard(value: Any) -> Any:
    """Return this process's shard of a state tensor on the host."""
    is_count = not isinstance(value, Tensor) or value.dim() == 0
    return value if is_count else local_tensor(value).cpu()


def _like_parameter(parameter: Tensor, value: Any) -> Any:
    """Return a state tensor with the layout and device of its parameter."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    return shard_like(value.to(local_tensor(parameter).device), parameter)


class OffloadedAdamW(_OffloadingOptimizer, torch.optim.AdamW):
    """AdamW that updates offloaded parameters on the host and all other parameters on the device.

    With fp32 states its results are bit-identical to those of torch's fused AdamW.
    """

    saved_as = "AdamW"

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.away, self.is_waiting, self.waiting = {}, False, {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters; offloaded ones in a thread (see `OffloadedParameter.wait`)."""
        ready = [
            (self.away[id(p)], group)
            for group in self.param_groups
            for p in group["params"]
            if id(p) in self.away
        ]
        for offloaded, group in sorted(ready, key=lambda pair: pair[0].order):
            gradient = offloaded.take_gradient()
            if gradient is not None:
                offloaded.begin_step()
                # A copy: the schedule may change the group's learning rate before the thread uses
                # it.
                numbers = {name: group[name] for name in ("lr", "weight_decay", "eps", "betas")}
                work = partial(_step_adamw, offloaded, gradient, numbers, float(offloaded.steps))
                offloaded.pending_copies.append(
                    offloaded.engine.run(work, f"step of parameter {offloaded.order}")
                )
        # Offloaded parameters have no `grad` any longer, so this updates only the others, on the
        # device, while the thread runs.
        return super().step(closure)

    def _counted(self, offloaded: OffloadedParameter) -> dict[str, Any]:
        return {"step": torch.tensor(float(offloaded.steps))}


def _step_adamw(
    offloaded: OffloadedParameter, gradient: Gradient, numbers: Group, step: float
) -> None:
    mean, square = offloaded.storages["exp_avg"], offloaded.storages["exp_avg_sq"]
    # The one-pass kernel is faster for a 16-bit gradient, 16-bit weights, or a scaled gradient.
    kernel = load_adam_kernel() if mean.dtype == torch.float32 else None
    kernel = kernel if len(gradient.factors) <= 1 else None
    for start in range(0, mean.numel, _CHUNK_ELEMENTS):
        stop = min(start + _CHUNK_ELEMENTS, mean.numel)
        weights = offloaded.weights(start, stop)
        moments = mean.fetch(start, stop), square.fetch(start, stop)
        narrow = None
        if kernel is None:
            step_plain(weights, gradient.read(start, stop), *moments, numbers, step)
        else:
            narrow = offloaded.new_narrow(stop - start)
            scale = gradient.factors[0] if gradient.factors else 1.0
            part = gradient.part(start, stop)
            kernel.step(weights, part, *moments, numbers, step, scale=scale, narrow=narrow)
        mean.put(start, moments[0])
        square.put(start, moments[1])
        copied = offloaded.put_weights(start, weights, narrow)
        if copied is not None:
            offloaded.pending_copies.append(copied)


class OffloadedMuon(_OffloadingOptimizer, Muon):
    """Muon whose momentum can be offloaded; it is fetched for each matrix's update."""

    saved_as = "Muon"

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.away, self.is_waiting, self.waiting = {}, False, {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all matrices; all processes of a sharded parameter's mesh must call it."""
        todo = []
        for group in self.param_groups:
            for p in group["params"]:
                offloaded = self.away.get(id(p))
                gradient = None if offloaded is None else offloaded.take_gradient()
                if offloaded is not None and gradient is not None:
                    todo.append((offloaded, gradient, group))
        buffers: dict[int, list[Tensor]] = {0: []}
        for index, (offloaded, gradient, group) in enumerate(todo):
            if index == 0:
                _fetch_momentum(offloaded, buffers[0])
            buffers[index + 1] = []
            if index + 1 < len(todo):
                _fetch_momentum(todo[index + 1][0], buffers[index + 1])
            offloaded.wait()
            (buffer,) = buffers.pop(index)
            offloaded.begin_step()
            _step_muon(offloaded, gradient, buffer, group)
        return super().step(closure)


def _fetch_momentum(offloaded: OffloadedParameter, into: list[Tensor]) -> None:
    home = offloaded.storages["momentum_buffer"]
    offloaded.pending_copies.append(
        offloaded.engine.run(lambda: into.append(home.fetch()), f"momentum {offloaded.order}")
    )


def _step_muon(
    offloaded: OffloadedParameter, gradient: Gradient, buffer: Tensor, group: Group
) -> None:
    parameter, home = offloaded.parameter, offloaded.storages["momentum_buffer"]
    local = local_tensor(parameter.detach())
    weights = offloaded.weights(0, home.numel)
    tensors = [t.to(local.device) for t in (weights, gradient.read(0, home.numel), buffer)]
    target, grad, momentum = (t.view(local.shape) for t in tensors)
    update_(target, grad, momentum, parameter, group)
    if offloaded.master is not None:
        if not is_streamed(parameter):
            local.copy_(target)
        offloaded.master.put(0, target.to(weights.device))
    home.put(0, momentum.to(buffer.device))

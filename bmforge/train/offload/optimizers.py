"""AdamW and Muon whose state lives on the host or on disk: the same numbers, less of the device.

A step of offloaded parameters runs on a thread, in the order of the model, while the device goes
on: their modules wait for it, each before its own next forward. Muon's runs in the step itself, for
its processes gather matrices together; the next momentum is fetched meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.device import is_host
from bmforge.memory.copies import CopyEngine, Ticket
from bmforge.memory.gradients import Gradient, LeftGradient, left_gradient
from bmforge.memory.homes import Home
from bmforge.shards import is_streamed, laid_out_like, local_tensor
from bmforge.train.optim.adam_kernel import load_adam_kernel, step_plain
from bmforge.train.optim.muon import Muon, update_

__all__ = ["Away", "OffloadedAdamW", "OffloadedMuon"]

# Elements stepped at a time: what is read from disk, or widened, is never larger.
_CHUNK_ELEMENTS = 1 << 20
Group = dict[str, Any]


@dataclass
class Away:
    """A parameter whose optimizer state is not on the device.

    Args:
        parameter: as the model has it.
        order: where it stands in the model.
        engine: copies, and steps on its thread.
        homes: name of a state -> where it lives.
        master: the fp32 weights where the parameter itself is narrower.
        steps: how often it was stepped.
        left: its gradient, where that leaves as it is produced.
        tickets: of the last step.
        changed: is told when a step begins.
        early: the gradient of the step in which the parameter was sent away.
    """

    parameter: nn.Parameter
    order: int
    engine: CopyEngine
    homes: dict[str, Home]
    master: Home | None = None
    steps: int = 0
    left: LeftGradient | None = None
    tickets: list[Ticket] = field(default_factory=list)
    changed: Callable[[], None] | None = None
    early: Tensor | None = None

    def wait(self) -> None:
        """Return when the last step is in the weights; any thread may wait.

        The host waits: what gathers weights may do so on a stream of its own.
        """
        number = 0
        while number < len(self.tickets):  # a step that is done may have added its copies
            self.tickets[number].wait_on_host()
            number += 1

    def begin_step(self) -> None:
        """Count a step, once the last one is done."""
        self.wait()
        self.tickets.clear()
        self.steps += 1
        if self.changed is not None:
            self.changed()

    def take_gradient(self) -> Gradient | None:
        """Return the step's gradient; None where there is none."""
        left = left_gradient(self.parameter)
        if left is not None:
            return left.take()
        gradient, self.early = self.early, None
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
        dtype = next(iter(self.homes.values())).dtype
        return Gradient(lambda start, stop: flat[start:stop], dtype)

    def weights(self, start: int, stop: int) -> Tensor:
        """Return weights to step: of the parameter itself, or of its wider copy."""
        if self.master is not None:
            return self.master.fetch(start, stop)
        return local_tensor(self.parameter.detach()).view(-1)[start:stop]

    def new_narrow(self, count: int) -> Tensor | None:
        """Return memory for stepped weights as the device wants them, where it wants bf16."""
        wants = self.master is not None and self.parameter.dtype == torch.bfloat16
        return self.engine.new_host((count,), torch.bfloat16) if wants else None

    def put_weights(
        self, start: int, values: Tensor, narrow: Tensor | None = None
    ) -> Ticket | None:
        """Keep stepped weights; the ticket tells when the parameter has them.

        Args:
            start: of the first.
            values: in the dtype they are stepped in.
            narrow: the same in the parameter's, if there.
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


class _KeptElsewhere:
    """What both optimizers share: which parameters are away, and their state for checkpoints."""

    away: dict[int, Away]
    state: Any
    # State from a checkpoint waits on the host until it is known what has room on the device.
    is_waiting: bool
    waiting: dict[Tensor, dict[str, Any]]

    def send_away(self, parameters: Iterable[Away]) -> None:
        """Take these parameters over; what a checkpoint had goes where it belongs."""
        for one in parameters:
            self.away[id(one.parameter)] = one
        self.is_waiting = False
        for parameter, values in self.waiting.items():
            self.write_state(parameter, {k: _put_back(parameter, v) for k, v in values.items()})
        self.waiting.clear()

    def read_state(self, parameter: Tensor) -> dict[str, Any]:
        """Return a parameter's state: tensors, or homes for those that live elsewhere."""
        one = self.away.get(id(parameter))
        if parameter in self.waiting:
            kept = self.waiting[parameter]
            return {name: _put_back(parameter, value) for name, value in kept.items()}
        if one is None:
            return self.state.get(parameter, {})
        one.wait()
        if not one.steps:
            return {}
        return {**self._counted(one), **one.homes}

    def write_state(self, parameter: Tensor, values: dict[str, Any]) -> None:
        """Take a parameter's state that a checkpoint holds."""
        if self.is_waiting:
            self.waiting[parameter] = {name: _take_off(value) for name, value in values.items()}
            return
        one = self.away.get(id(parameter))
        if one is None:
            self.state[parameter] = values
            return
        one.wait()
        one.steps = int(values.get("step", 1)) if values else 0  # none: it was never stepped
        for name, home in one.homes.items():
            if values:
                home.put(0, local_tensor(values[name]).to(home.dtype).cpu())
            else:
                home.clear()

    def _counted(self, one: Away) -> dict[str, Any]:
        return {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, those that have left as well."""
        for one in self.away.values():
            one.early = None
            if one.left is not None:
                one.left.clear()
        super().zero_grad(set_to_none)  # type: ignore[misc]


def _take_off(value: Any) -> Any:
    """Return this process's part of a tensor of state, on the host."""
    is_count = not isinstance(value, Tensor) or value.dim() == 0
    return value if is_count else local_tensor(value).cpu()


def _put_back(parameter: Tensor, value: Any) -> Any:
    """Return a tensor of state as the optimizer has it: laid out and placed like its parameter."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    return laid_out_like(value.to(local_tensor(parameter).device), parameter)


class OffloadedAdamW(_KeptElsewhere, torch.optim.AdamW):
    """AdamW; parameters that were sent away step on the host, the others as ever.

    Equal to torch's fused AdamW bit for bit where states are fp32.
    """

    saved_as = "AdamW"

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.away, self.is_waiting, self.waiting = {}, False, {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step what is here; what is away is stepped when `Away.wait` returns."""
        found = [
            (self.away[id(p)], group)
            for group in self.param_groups
            for p in group["params"]
            if id(p) in self.away
        ]
        for one, group in sorted(found, key=lambda pair: pair[0].order):
            gradient = one.take_gradient()
            if gradient is not None:
                one.begin_step()
                numbers = {name: group[name] for name in ("lr", "weight_decay", "eps", "betas")}
                work = partial(_step_adamw, one, gradient, numbers, float(one.steps))
                one.tickets.append(one.engine.run(work, f"step of parameter {one.order}"))
        return super().step(closure)

    def _counted(self, one: Away) -> dict[str, Any]:
        return {"step": torch.tensor(float(one.steps))}


def _step_adamw(one: Away, gradient: Gradient, numbers: Group, step: float) -> None:
    mean, square = one.homes["exp_avg"], one.homes["exp_avg_sq"]
    # In one pass where that saves any: a wider gradient, narrower weights, or scaling.
    kernel = load_adam_kernel() if mean.dtype == torch.float32 else None
    kernel = kernel if len(gradient.factors) <= 1 else None
    for start in range(0, mean.numel, _CHUNK_ELEMENTS):
        stop = min(start + _CHUNK_ELEMENTS, mean.numel)
        weights = one.weights(start, stop)
        moments = mean.fetch(start, stop), square.fetch(start, stop)
        narrow = None
        if kernel is None:
            step_plain(weights, gradient.read(start, stop), *moments, numbers, step)
        else:
            narrow = one.new_narrow(stop - start)
            scale = gradient.factors[0] if gradient.factors else 1.0
            part = gradient.part(start, stop)
            kernel.step(weights, part, *moments, numbers, step, scale=scale, narrow=narrow)
        mean.put(start, moments[0])
        square.put(start, moments[1])
        copied = one.put_weights(start, weights, narrow)
        if copied is not None:
            one.tickets.append(copied)


class OffloadedMuon(_KeptElsewhere, Muon):
    """Muon; the momentum of matrices that were sent away comes for their update, whole."""

    saved_as = "Muon"

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.away, self.is_waiting, self.waiting = {}, False, {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every matrix; every process of a sharded parameter's mesh must call it."""
        todo = []
        for group in self.param_groups:
            for p in group["params"]:
                one = self.away.get(id(p))
                gradient = None if one is None else one.take_gradient()
                if one is not None and gradient is not None:
                    todo.append((one, gradient, group))
        buffers: dict[int, list[Tensor]] = {0: []}
        for index, (one, gradient, group) in enumerate(todo):
            if index == 0:
                _fetch_momentum(one, buffers[0])
            buffers[index + 1] = []
            if index + 1 < len(todo):
                _fetch_momentum(todo[index + 1][0], buffers[index + 1])
            one.wait()
            (buffer,) = buffers.pop(index)
            one.begin_step()
            _step_muon(one, gradient, buffer, group)
        return super().step(closure)


def _fetch_momentum(one: Away, into: list[Tensor]) -> None:
    home = one.homes["momentum_buffer"]
    one.tickets.append(one.engine.run(lambda: into.append(home.fetch()), f"momentum {one.order}"))


def _step_muon(one: Away, gradient: Gradient, buffer: Tensor, group: Group) -> None:
    parameter, home = one.parameter, one.homes["momentum_buffer"]
    local = local_tensor(parameter.detach())
    weights = one.weights(0, home.numel)
    here = [t.to(local.device) for t in (weights, gradient.read(0, home.numel), buffer)]
    target, grad, momentum = (t.view(local.shape) for t in here)
    update_(target, grad, momentum, parameter, group)
    if one.master is not None:
        if not is_streamed(parameter):
            local.copy_(target)
        one.master.put(0, target.to(weights.device))
    home.put(0, momentum.to(buffer.device))

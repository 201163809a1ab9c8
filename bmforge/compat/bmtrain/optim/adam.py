"""Adam optimizers with fp32 states for parameters of any dtype, on the device or the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from bmforge.compat.bmtrain.optim.state import all_parameters, pack_state, unpack_state
from bmforge.compat.bmtrain.runtime import config
from bmforge.device import is_host
from bmforge.memory.copies import CopyEngine, make_copy_engine
from bmforge.shards import local_tensor

__all__ = ["AdamOffloadOptimizer", "AdamOptimizer"]


class AdamOptimizer(torch.optim.Optimizer):
    """AdamW optimizer with torch's formula, and an fp32 copy of half-precision parameters.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        betas, eps: as in torch.optim.AdamW.
        weight_decay: decoupled weight decay, for every dtype.
        hold_steps: number of initial steps that update only the moments, not the parameters.
        scale: loss scale of the older training loop (`loss_scale`, `optim_step`).
    """

    # Where states are kept; None: with the parameter.
    state_device: torch.device | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        hold_steps: int = 0,
        scale: float = 65536.0,
    ) -> None:
        config.need(type(self).__name__)
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, settings)
        self.hold_steps, self._scale, self._pending = hold_steps, float(scale), 1.0
        self.steps_since_last_scale = 0

    @property
    def scale(self) -> float:
        """Loss scale of the older training loop."""
        return self._scale

    def loss_scale(self, loss: Tensor) -> Tensor:
        """Return the scaled loss for backward, divided by the number of processes."""
        self._pending = self._scale
        return loss * (self._scale / config["world_size"])

    def justify_scale(self, scale: float) -> None:
        """Set the loss scale."""
        self._scale, self.steps_since_last_scale = float(scale), 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, scale: float | None = None) -> Any:  # type: ignore[override]
        """Update all parameters that have a gradient.

        Args:
            closure: function that computes the loss and gradients again, as in torch.
            scale: loss scale to divide gradients by (default: that of `loss_scale`, if called).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale = self._pending if scale is None else scale
        self._pending = 1.0
        self.steps_since_last_scale += 1
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(group, params, scale)
        return loss

    def _update(self, group: dict[str, Any], params: list[Tensor], scale: float) -> None:
        states = [self._state_of(param) for param in params]
        pairs = zip(params, states, strict=True)
        masters = [state.get("master", local_tensor(param)) for param, state in pairs]
        grads = [local_tensor(param.grad) for param in params]  # type: ignore[arg-type]
        # On a CPU, the fused kernel takes a third of the time, but it rounds differently. fp32
        # parameters of `AdamOptimizer` get the results of torch.optim.Adam, as in BMTrain.
        fused = is_host(masters[0].device) and (
            self.state_device is not None or any("master" in state for state in states)
        )
        self._step(group, states, masters, grads, scale, fused)
        for param, master in zip(params, masters, strict=True):
            local = local_tensor(param)
            if master is not local:
                local.copy_(master)

    def _step(
        self,
        group: dict[str, Any],
        states: list[dict[str, Any]],
        masters: list[Tensor],
        gradients: list[Tensor],
        scale: float,
        fused: bool,
    ) -> None:
        """Update the fp32 `masters`, all on one device; `fused` selects torch's fused kernel."""
        grads = []
        for gradient, master in zip(gradients, masters, strict=True):
            grad = gradient.to(master.device, master.dtype)
            grads.append(grad if scale == 1.0 else grad / scale)
        steps = [state["step"] for state in states]
        is_held = bool(self.hold_steps) and float(steps[0]) < self.hold_steps
        beta1, beta2 = group["betas"]
        adamw(
            masters,
            grads,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            steps,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=0.0 if is_held else group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            fused=fused or None,  # with None, torch decides
        )

    def _state_of(self, param: Tensor) -> dict[str, Any]:
        """Return a parameter's state, created if missing; `master` is its fp32 copy."""
        state = self.state[param]
        if not state:
            local = local_tensor(param.detach())
            home = self.state_device or local.device
            wide = local.to(home, torch.promote_types(local.dtype, torch.float32))
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(wide)
            state["exp_avg_sq"] = torch.zeros_like(wide)
            # Otherwise the parameter itself is the fp32 copy.
            if (wide.dtype, wide.device) != (local.dtype, local.device):
                state["master"] = wide
        return state

    def state_dict(self, gather: bool = False) -> dict[str, Any]:  # type: ignore[override]
        """Return the state as ordinary tensors: local shards, or with `gather` full tensors."""
        return {**pack_state(self, gather), "scale": self._scale}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the optimizer from a state that `state_dict` returned.

        Raises:
            CheckpointError: the parameters differ, or a sharded state was saved with a different
                number of processes.
        """
        unpacked = unpack_state(self, state_dict)
        # Torch would cast the states to the parameters' dtype.
        super().load_state_dict({"state": {}, "param_groups": unpacked["param_groups"]})
        self._scale = float(state_dict.get("scale", self._scale))
        self.state.clear()
        for index, param in enumerate(all_parameters(self)):
            if index in unpacked["state"]:
                local_device = local_tensor(param).device
                home = self.state_device or local_device
                self.state[param] = {
                    key: local_tensor(v).to(home if v.dim() else "cpu").clone()
                    for key, v in unpacked["state"][index].items()
                }


class AdamOffloadOptimizer(AdamOptimizer):
    """Variant of `AdamOptimizer` that keeps its states, and updates parameters, on the host.

    Without an accelerator the results equal those of `AdamOptimizer`, except for the rounding of
    fp32 parameters, which are updated by torch's fused kernel. Gradients and updated weights are
    copied while other parameters are updated. `step` returns when all parameters are updated, and
    the device waits for the last copy.

    Args:
        params, lr, betas, eps, weight_decay, hold_steps, scale: see `AdamOptimizer`.
        record_delta: True to record the mean and variance of the last update.
    """

    state_device = torch.device("cpu")

    def __init__(self, params: Iterable[Any], *args: Any, record_delta: bool = False, **kw: Any):
        super().__init__(params, *args, **kw)
        self._records, self._delta = record_delta, torch.zeros(3, dtype=torch.float64)
        self._engine: CopyEngine | None = None
        # Parameter -> host memory for its gradient, and then for its weights.
        self._staging: dict[Tensor, Tensor] = {}

    def step(self, closure: Callable[[], Any] | None = None, scale: float | None = None) -> Any:  # type: ignore[override]
        """Update all parameters that have a gradient; see `AdamOptimizer.step`."""
        self._delta.zero_()
        return super().step(closure, scale)

    def _update(self, group: dict[str, Any], params: list[Tensor], scale: float) -> None:
        before = [local_tensor(p).detach().clone() for p in params] if self._records else []
        away = [param for param in params if "master" in self._state_of(param)]
        low_precision = [param for param in params if "master" not in self._state_of(param)]
        if low_precision:
            super()._update(group, low_precision, scale)
        if away:
            self._update_away(group, away, scale)
        for old, param in zip(before, params, strict=False):
            delta = (local_tensor(param).detach() - old).double()
            sums = torch.stack((delta.sum(), delta.square().sum())).cpu()
            self._delta += torch.cat((torch.tensor([float(delta.numel())]), sums))

    def _update_away(self, group: dict[str, Any], params: list[Tensor], scale: float) -> None:
        """Update parameters on the host; updates overlap with copies."""
        if self._engine is None:
            self._engine = make_copy_engine(local_tensor(params[0]).device, "bmtrain-offload")
        engine, coming, going = self._engine, [], []
        for number, param in enumerate(params):
            gradient = local_tensor(param.grad)  # type: ignore[arg-type]
            if param not in self._staging:
                self._staging[param] = engine.new_host(tuple(gradient.shape), gradient.dtype)
            label = f"gradient {number}"
            coming.append(engine.copy_(self._staging[param], gradient, label))
        for number, (param, ticket) in enumerate(zip(params, coming, strict=True)):
            state, staging, target = self.state[param], self._staging[param], local_tensor(param)
            ticket.wait_on_host()
            self._step(group, [state], [state["master"]], [staging], scale, fused=True)
            staging.copy_(state["master"])
            going.append(engine.copy_(target.detach(), staging, f"weights {number}"))
        for ticket in going:
            ticket.wait()

    def _moments(self) -> tuple[float, float]:
        total = self._delta.to(config.device)
        dist.all_reduce(total, group=config["comm"])
        count, first, second = total.tolist()
        mean = first / max(1.0, count)
        return mean, second / max(1.0, count) - mean * mean

    def get_avg_delta(self) -> float:
        """Return the mean of the last update over all parameters; needs `record_delta`."""
        return self._moments()[0]

    def get_var_delta(self) -> float:
        """Return the variance of the last update over all parameters; needs `record_delta`."""
        return self._moments()[1]

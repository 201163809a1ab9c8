"""BMTrain's training step: scaled backward, clipping, overflow handling, and schedules."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bmforge.compat.bmtrain.lr_scheduler import WarmupLRScheduler
from bmforge.compat.bmtrain.optim.adam import AdamOptimizer
from bmforge.compat.bmtrain.optim.state import (
    check_optimizer,
    pack_state,
    step_shares,
    unpack_state,
)
from bmforge.compat.bmtrain.parameter import origin_of
from bmforge.compat.bmtrain.runtime import config
from bmforge.errors import CheckpointError, ConfigError
from bmforge.logging import get_logger
from bmforge.shards import local_tensor
from bmforge.train.precision import LossScaler

__all__ = ["OptimManager", "check_overflow", "clip_grad_norm", "grad_rescale", "optim_step"]

Groups = Iterable[Mapping[str, Any]]


class OptimManager:
    """Steps optimizers and their schedules together, with one dynamic loss scale.

    Args:
        loss_scale: initial loss scale; None for no scaling.
        loss_scale_factor: factor by which the scale grows and shrinks.
        loss_scale_steps: number of steps without overflow after which the scale grows.
        min_loss_scale, max_loss_scale: bounds of the scale.
        grad_scale: divisor of the loss, so that gradients summed over processes are means (default:
            the number of processes). For a loss that tensor-parallel processes compute together
            (FusedCrossEntropy with parallel=True), pass bmt.config["tp_zero_size"].
    """

    def __init__(
        self,
        loss_scale: float | None = None,
        loss_scale_factor: float = 2.0,
        loss_scale_steps: int = 1024,
        min_loss_scale: float = 1.0,
        max_loss_scale: float = math.inf,
        grad_scale: float | None = None,
    ) -> None:
        config.need("OptimManager")
        factor = loss_scale_factor if loss_scale_factor > 1 else 1.0 / loss_scale_factor
        self.loss_scale_enabled = loss_scale is not None
        self._scaler = LossScaler(
            1.0 if loss_scale is None else loss_scale,
            loss_scale_steps,
            factor,
            1.0 / factor,
            min(min_loss_scale, 1.0 if loss_scale is None else loss_scale),
        )
        self.max_loss_scale = max_loss_scale
        self.grad_scale = config["world_size"] if grad_scale is None else grad_scale
        self.optimizers: list[torch.optim.Optimizer] = []
        self.lr_schedulers: list[WarmupLRScheduler | None] = []

    @property
    def loss_scale(self) -> float:
        """Current loss scale."""
        return self._scaler.current_scale

    def add_optimizer(
        self, optimizer: torch.optim.Optimizer, lr_scheduler: WarmupLRScheduler | None = None
    ) -> None:
        """Add a torch or bmforge optimizer, and its learning-rate scheduler.

        Raises:
            ConfigError: the optimizer is LBFGS, or SparseAdam on several processes.
        """
        check_optimizer(optimizer)
        self.optimizers.append(optimizer)
        self.lr_schedulers.append(lr_scheduler)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the scaled loss for backward."""
        return loss * (self.loss_scale / self.grad_scale)

    def backward(self, loss: Tensor) -> None:
        """Run backward on the scaled loss; gradients are accumulated in `.grad`."""
        self.scale_loss(loss).backward()

    def zero_grad(self) -> None:
        """Clear the gradients of all optimizers."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def clip_grad_norm(
        self,
        param_groups: Groups,
        max_norm: float,
        norm_type: float | str = 2,
        eps: float = 1e-6,
        *,
        scale: float | None = None,
    ) -> Tensor:
        """Clip gradients to a norm of `max_norm`; return the unscaled norm before clipping.

        Args:
            param_groups, max_norm, norm_type, eps: see the function `clip_grad_norm`.
            scale: accepted and ignored; programs for older versions pass the optimizer's scale,
                but the manager's loss scale is used.

        Comm: one all-reduce of a scalar.
        """
        return clip_grad_norm(param_groups, max_norm, self.loss_scale, norm_type, eps)

    def step(self) -> None:
        """Step optimizers and schedules; skip the step if a gradient is not finite.

        Comm: one all-reduce of a scalar.
        """
        if not _is_finite(group for own in self.optimizers for group in own.param_groups):
            before = self.loss_scale
            if self.loss_scale_enabled:
                self._update_scale(overflow=True)
            if config["rank"] == 0:
                get_logger().warning(
                    "a gradient is infinite or NaN, so the step is skipped and the loss scale "
                    "is reduced from %g to %g",
                    before,
                    self.loss_scale,
                )
            self.zero_grad()
            return
        for optimizer, schedule in zip(self.optimizers, self.lr_schedulers, strict=True):
            if isinstance(optimizer, AdamOptimizer):
                optimizer.step(scale=self.loss_scale)
            else:
                grad_rescale(optimizer.param_groups, self.loss_scale)
                step_shares(optimizer)
            if schedule is not None:
                schedule.step()
        if self.loss_scale_enabled:
            self._update_scale(overflow=False)

    def _update_scale(self, overflow: bool) -> None:
        self._scaler.update(overflow)
        self._scaler.current_scale = min(self._scaler.current_scale, self.max_loss_scale)

    def state_dict(self, gather_opt: bool = False) -> dict[str, Any]:
        """Return the state to resume from, as ordinary tensors and numbers.

        Args:
            gather_opt: return full optimizer states, for any number of processes, instead of each
                process's shards.
        """
        return {
            "optimizers": [pack_state(optimizer, gather_opt) for optimizer in self.optimizers],
            "lr_schedulers": [s if s is None else s.state_dict() for s in self.lr_schedulers],
            "loss_scaler": self._scaler.state_dict(),
            "loss_scale_enabled": self.loss_scale_enabled,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the optimizers and schedules from a state that `state_dict` returned.

        Raises:
            CheckpointError: the optimizers or parameters differ.
        """
        states = state_dict["optimizers"]
        if len(states) != len(self.optimizers):
            raise CheckpointError(
                f"the state was saved for {len(states)} optimizers, but {len(self.optimizers)} "
                "were added. Add the optimizers with which the state was saved."
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            if isinstance(optimizer, AdamOptimizer):
                optimizer.load_state_dict(state)
            else:
                optimizer.load_state_dict(unpack_state(optimizer, state))
        for schedule, state in zip(self.lr_schedulers, state_dict["lr_schedulers"], strict=True):
            if schedule is not None and state is not None:
                schedule.load_state_dict(state)
        self.loss_scale_enabled = state_dict["loss_scale_enabled"]
        self._scaler.load_state_dict(state_dict["loss_scaler"])


def _grads(groups: Groups) -> list[tuple[Tensor, Tensor]]:
    """Return (parameter, gradient) pairs of all parameters with a gradient.

    A gradient is given by its local shard, or by its values if it is sparse.
    """
    grads = []
    for param in (param for group in groups for param in group["params"]):
        if param.grad is not None and param.grad.is_sparse:
            param.grad = param.grad.coalesce()
            grads.append((param, param.grad.values()))
        elif param.grad is not None:
            grads.append((param, local_tensor(param.grad)))
    return grads


@torch.no_grad()
def _is_finite(groups: Groups) -> bool:
    """Return True on every process if the gradients of all processes are finite."""
    bad = torch.zeros((), dtype=torch.float32, device=config.device)
    for _, grad in _grads(groups):
        if grad.numel():
            bad += (~torch.isfinite(grad.abs().max())).float()
    dist.all_reduce(bad, dist.ReduceOp.MAX, group=config["comm"])
    return not bool(bad > 0)


def check_overflow(param_groups: Groups) -> None:
    """Raise an error if a gradient on any process is not finite.

    Raises:
        OverflowError: a gradient is not finite.

    Comm: one all-reduce of a scalar.
    """
    if not _is_finite(param_groups):
        raise OverflowError(
            "a gradient is infinite or NaN. Skip this step and lower the loss scale."
        )


@torch.no_grad()
def grad_rescale(param_groups: Groups, scale: float) -> None:
    """Divide the gradients by `scale`."""
    if scale != 1.0:
        for _, grad in _grads(param_groups):
            grad.div_(scale)


@torch.no_grad()
def clip_grad_norm(
    param_groups: Groups,
    max_norm: float,
    scale: float = 1.0,
    norm_type: float | str = 2,
    eps: float = 1e-6,
) -> Tensor:
    """Clip gradients to a norm of `max_norm`; return the norm before clipping.

    Args:
        param_groups: parameter groups of an optimizer.
        max_norm: maximum norm of the unscaled gradients (divided by `scale`).
        scale: loss scale of the gradients.
        norm_type: p of the norm; infinity or "inf" is the largest absolute value.
        eps: number added to the norm before dividing.

    Comm: one all-reduce of a scalar.
    """
    power = float(norm_type)
    if not power > 0.0:
        raise ConfigError(f"norm_type={norm_type} must be above 0.")
    nonempty = [(p, grad) for p, grad in _grads(param_groups) if grad.numel()]
    total = torch.zeros((), dtype=torch.float64, device=config.device)
    for param, grad in nonempty:
        if _is_in_norm(param):
            norm = torch.linalg.vector_norm(grad, power, dtype=_wide(grad)).double()
            total = torch.maximum(total, norm) if math.isinf(power) else total + norm**power
    operation = dist.ReduceOp.MAX if math.isinf(power) else dist.ReduceOp.SUM
    dist.all_reduce(total, operation, group=config["comm"])
    norm = (total if math.isinf(power) else total ** (1.0 / power)) / scale
    ratio = float(max_norm / (norm + eps))
    if ratio < 1.0:
        for _, grad in nonempty:
            grad.mul_(ratio)
    return norm.float()


def _wide(grad: Tensor) -> torch.dtype:
    return torch.promote_types(grad.dtype, torch.float32)


def _is_in_norm(param: Tensor) -> bool:
    """Return True if the norm includes this process's gradient; replicas are counted once."""
    origin = origin_of(param)
    if origin is None:
        return bool(config["rank"] == 0)
    if origin.tp_mode and origin.cut == 1 and config["tp_rank"] > 0:
        return False
    whole_here = param.dim() == 0  # a scalar is replicated instead of sharded
    first = config["tp_zero_rank"] == 0 if origin.tp_mode else config["rank"] == 0
    return not whole_here or first


def optim_step(optim: torch.optim.Optimizer, lr_scheduler: WarmupLRScheduler | None = None) -> None:
    """Step as BMTrain's older loop does; skip the step if a gradient is not finite.

    A skipped step divides `optim.scale` by the factor given to `init_distributed`; after a number
    of steps without overflow, also given there, the scale is multiplied by that factor.
    """
    config.need("optim_step")
    check_optimizer(optim)
    factor = config["loss_scale_factor"]
    is_ours = isinstance(optim, AdamOptimizer)
    if not _is_finite(optim.param_groups):
        if is_ours:
            optim.justify_scale(max(1.0, optim.scale / factor))
        if config["rank"] == 0:
            get_logger().warning("a gradient is infinite or NaN, so the step is skipped")
        optim.zero_grad()
        return
    if is_ours:
        optim.step()
    else:
        step_shares(optim)
    if lr_scheduler is not None:
        lr_scheduler.step()
    if is_ours and optim.steps_since_last_scale >= config["loss_scale_steps"]:
        optim.justify_scale(optim.scale * factor)

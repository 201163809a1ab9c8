"""Checks a model's precision, and scales the loss of fp16 runs to avoid gradient underflow.

The scaler does not detect overflows. The caller detects them in the all-reduced gradient norm, so
all processes make the same decision and have the same scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.parallel import is_half, master_weight_problems, offloaded_gradient, upcast_trained_
from bmforge.records import find_parallel_record
from bmforge.shards import local_tensor

__all__ = ["LossScaler", "check_precision", "ensure_master_weights_"]

_LARGEST_SCALE = torch.finfo(torch.float32).max


class LossScaler:
    """Multiplies the loss by a scale that grows after finite steps and is reduced on overflow.

    Args:
        init_scale: initial loss scale.
        growth_interval_steps: consecutive finite steps after which the scale grows.
        growth_factor: factor by which the scale grows.
        backoff_factor: factor on the scale after an overflow, between 0 and 1.
        min_scale: lower bound of the scale.

    Source: the scale follows the rule of `torch.amp.GradScaler`, with a lower bound added.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_interval_steps: int = 2000,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        min_scale: float = 1.0,
    ) -> None:
        if growth_interval_steps < 1:
            raise ConfigError(f"growth_interval_steps={growth_interval_steps} must be at least 1.")
        if growth_factor <= 1.0 or not 0.0 < backoff_factor < 1.0:
            raise ConfigError(
                f"growth_factor={growth_factor} must be above 1 and "
                f"backoff_factor={backoff_factor} between 0 and 1."
            )
        if not 0.0 < min_scale <= init_scale <= _LARGEST_SCALE:
            raise ConfigError(
                f"min_scale={min_scale} must be above 0 and at most init_scale={init_scale}, "
                "which must be finite."
            )
        self.current_scale = float(init_scale)
        self._growth_interval_steps = growth_interval_steps
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._min_scale = min_scale
        self._sound_steps = 0

    @torch.no_grad()
    def unscale_(self, parameters: Iterable[Tensor]) -> None:
        """Divide every gradient by the scale, in place; call once per step, before clipping.

        Raises:
            ConfigError: a gradient is float16, in which dividing by the scale would underflow.
        """
        inverse = 1.0 / self.current_scale
        for parameter in parameters:
            left = offloaded_gradient(parameter)
            if left is not None:
                left.scale_(inverse)
            if parameter.grad is None:
                continue
            if parameter.grad.dtype == torch.float16:
                raise ConfigError(
                    "a gradient has dtype=torch.float16, but loss scaling needs float32 "
                    "parameters that are cast to float16 for the forward pass. Load the model "
                    "in float32."
                )
            local_tensor(parameter.grad).mul_(inverse)

    def update(self, overflow: bool) -> None:
        """Adapt the scale after a step; `overflow` must be the same on every process."""
        if overflow:
            self.current_scale = max(self._min_scale, self.current_scale * self._backoff_factor)
            self._sound_steps = 0
            return
        self._sound_steps += 1
        if self._sound_steps == self._growth_interval_steps:
            grown = self.current_scale * self._growth_factor
            self.current_scale = grown if grown <= _LARGEST_SCALE else self.current_scale
            self._sound_steps = 0

    def state_dict(self) -> dict[str, float]:
        """Return the state as a dict of numbers."""
        return {"scale": self.current_scale, "sound_steps": self._sound_steps}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the state returned by `state_dict`.

        Raises:
            ConfigError: a number is missing or out of range.
        """
        scale, steps = state.get("scale"), state.get("sound_steps")
        if scale is None or steps is None or not math.isfinite(scale) or scale <= 0 or steps < 0:
            raise ConfigError(
                f"the state of the loss scaler is {dict(state)!r} (needed: a positive finite "
                "'scale', and 'sound_steps' of at least 0)."
            )
        self.current_scale, self._sound_steps = float(scale), int(steps)


def check_precision(model: nn.Module, precision: str) -> None:
    """Raise an error if the model's precision differs from that of the training loop.

    Raises:
        ConfigError: the model was parallelized with a different precision, or not parallelized at
            all.
    """
    record = find_parallel_record(model)
    model_precision = None if record is None else record.precision
    if model_precision != precision and (model_precision is not None or precision != "fp32"):
        has = (
            "is not parallelized"
            if model_precision is None
            else f"was parallelized with precision={model_precision!r}"
        )
        raise ConfigError(
            f"train.precision={precision!r}, but the model {has}. Call parallelize(model, "
            f"layout, precision={precision!r}) before training, or set "
            f"train.precision={model_precision or 'fp32'!r}."
        )


def ensure_master_weights_(model: nn.Module, precision: str, master_weights: bool) -> None:
    """Upcast the trained 16-bit parameters of a model that was not upcast by `parallelize`.

    Args:
        model: model to be trained.
        precision: precision of the training loop.
        master_weights: False leaves 16-bit parameters unchanged.

    Raises:
        ConfigError: a parameter cannot be upcast, because it is already sharded, or because
            there are frozen 16-bit parameters and the precision is fp32.
    """
    record = find_parallel_record(model)
    if not master_weights or (record is not None and not record.master_weights):
        return
    problems = master_weight_problems(model, precision)
    if record is not None and record.mesh is not None:
        problems = [
            (
                f"the trained parameter {name} has dtype={p.dtype}, because it was frozen when "
                "the model was parallelized. Set requires_grad=True before parallelize, which "
                "then upcasts the parameter, or set master_weights=False in parallelize and in "
                "TrainConfig"
            )
            for name, p in model.named_parameters()
            if p.requires_grad and is_half(p)
        ][:1]
    if problems:
        raise ConfigError(f"cannot train {type(model).__name__}: {'; '.join(problems)}.")
    upcast_trained_(model, precision)

"""Learning-rate schedules: pure functions from step number to learning-rate multiplier.

Schedules have no state: the multiplier of optimizer step ``s`` (0-based) depends only on ``s``, so
the step number in a checkpoint determines the learning rate.

With ``w`` warm-up steps, ``n`` steps in all and the floor ``m = min_lr_ratio``:

* warm-up, ``s < w``: ``(s + 1) / w``, so that the first step already learns and step ``w - 1`` is
  at the peak;
* afterwards ``p = (s - w) / (n - w)`` runs from 0 to 1 and the multiplier is

  ============  =======================================================================
  constant      1
  linear        m + (1 - m) (1 - p)
  cosine        m + (1 - m) (1 + cos(pi p)) / 2
  exponential   m ** p                                      (the floor is the end value)
  noam          max(m, sqrt(w / (s + 1)))
  wsd           1, then over the last ``decay_steps`` steps, with q from 0 to 1, m + (1 - m) d(q),
  where d is 1 - q, (1 + cos(pi q)) / 2 or 1 - sqrt(q)
  ============  =======================================================================
* from step ``n`` on the multiplier stays at the floor (constant: at 1; noam: it keeps falling).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from bmforge.errors import ConfigError
from bmforge.value_ranges import check_values

__all__ = ["ScheduleConfig", "build_schedule", "set_learning_rate_"]

LearningRate = Callable[[int], float]

_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda p: 1.0 - p,
    "cosine": lambda p: 0.5 * (1.0 + math.cos(math.pi * p)),
    "1-sqrt": lambda p: 1.0 - math.sqrt(p),
}


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning-rate schedule and the lengths of its phases.

    Args:
        kind: learning-rate schedule after the warm-up: constant, linear, cosine, exponential, noam
            or wsd (warmup-stable-decay).
        warmup_steps: number of steps of linear warm-up; noam requires at least 1.
        min_lr_ratio: final learning rate as a fraction of the peak, from 0 to 1; exponential
            requires a value above 0.
        total_steps: length of the schedule in steps (if None: the length of the run).
        decay_steps: length of the final decay of wsd in steps (if None: a tenth of the schedule).
        decay_kind: shape of the final decay of wsd: linear, cosine or 1-sqrt (if None: 1-sqrt).
    """

    kind: str = "cosine"
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0
    total_steps: int | None = None
    decay_steps: int | None = None
    decay_kind: str | None = None


def build_schedule(config: ScheduleConfig, total_steps: int) -> LearningRate:
    """Return the function from step number (0-based) to learning-rate multiplier.

    Args:
        config: schedule settings; settings without effect raise an error.
        total_steps: length of the run, used if the config does not set its own.

    Raises:
        ConfigError: the kind is unknown, a value is out of range, or a setting has no effect.
    """
    total = total_steps if config.total_steps is None else config.total_steps
    _check(config, total)
    warmup = config.warmup_steps
    after = _after_warmup(config, total)

    def multiplier(step: int) -> float:
        if step < 0:
            raise ConfigError(f"step={step} must be at least 0.")
        if step < warmup:
            return (step + 1) / warmup
        return after(step)

    return multiplier


def _after_warmup(config: ScheduleConfig, total: int) -> LearningRate:
    """Return the schedule after the warm-up."""
    warmup, floor = config.warmup_steps, config.min_lr_ratio
    if config.kind == "constant":
        return lambda step: 1.0
    if config.kind == "noam":
        return lambda step: max(floor, math.sqrt(warmup / (step + 1)))
    if config.kind == "exponential":
        return lambda step: floor ** _progress(step, warmup, total)
    if config.kind == "wsd":
        shape = _SHAPES[config.decay_kind or "1-sqrt"]
        start = total - _decay_steps(config, total)
    else:
        shape, start = _SHAPES[config.kind], warmup
    return lambda step: floor + (1.0 - floor) * shape(_progress(step, start, total))


def _progress(step: int, start: int, end: int) -> float:
    """Return the progress of `step` from `start` to `end`, clamped to [0, 1]."""
    if step >= end:
        return 1.0
    return 0.0 if step <= start else (step - start) / (end - start)


def _decay_steps(config: ScheduleConfig, total: int) -> int:
    """Return the length of the wsd decay."""
    if config.decay_steps is not None:
        return config.decay_steps
    return min(max(1, total // 10), total - config.warmup_steps)


def _check(config: ScheduleConfig, total: int) -> None:
    """Raise `ConfigError` for the first setting that is invalid or has no effect."""
    check_values(config, "train.schedule.")
    if total < 1:
        raise ConfigError(f"total_steps={total} must be at least 1.")
    if config.warmup_steps > total:
        raise ConfigError(
            f"schedule.warmup_steps={config.warmup_steps} must be from 0 to "
            f"total_steps={total}. Use fewer warm-up steps, or train for more steps."
        )
    _check_effects(config)
    _check_kind(config, total)


def _check_effects(config: ScheduleConfig) -> None:
    """Raise `ConfigError` for a setting that has no effect with the kind of schedule."""
    unused = []
    if config.kind == "constant" and config.min_lr_ratio != 0.0:
        unused.append("min_lr_ratio")
    if config.kind in ("constant", "noam") and config.total_steps is not None:
        unused.append("total_steps")
    if config.kind != "wsd":
        unused += [n for n in ("decay_steps", "decay_kind") if getattr(config, n) is not None]
    if unused:
        named = ", ".join(f"schedule.{name}={getattr(config, name)!r}" for name in unused)
        raise ConfigError(
            f"{named} has no effect with schedule.kind={config.kind!r}. Leave it out or choose "
            "another kind."
        )


def _check_kind(config: ScheduleConfig, total: int) -> None:
    """Raise `ConfigError` if a setting that the kind of schedule needs is out of range."""
    if config.kind == "noam" and config.warmup_steps < 1:
        raise ConfigError(
            f"schedule.warmup_steps={config.warmup_steps} must be at least 1 with "
            "schedule.kind='noam'."
        )
    if config.kind == "exponential" and config.min_lr_ratio == 0.0:
        raise ConfigError(
            f"schedule.min_lr_ratio={config.min_lr_ratio} must be above 0 (for example 0.1) with "
            "schedule.kind='exponential', which decays to this ratio."
        )
    if config.kind != "wsd":
        return
    decay = _decay_steps(config, total)
    if config.warmup_steps + decay > total:
        raise ConfigError(
            f"schedule.decay_steps={decay} must be, together with "
            f"schedule.warmup_steps={config.warmup_steps}, at most total_steps={total}."
        )


def set_learning_rate_(optimizers: Iterable[torch.optim.Optimizer], multiplier: float) -> None:
    """Set every parameter group's learning rate to its ``base_lr`` times `multiplier`.

    If a group has no ``base_lr``, its current ``lr`` is stored as ``base_lr``.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            base_lr = group.setdefault("base_lr", group["lr"])
            group["lr"] = base_lr * multiplier

"""Configuration of the training loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from bmforge.errors import ConfigError
from bmforge.train.optim.build import OptimConfig
from bmforge.train.profile import SKIPPED_STEPS
from bmforge.train.schedule import ScheduleConfig

__all__ = ["TrainConfig"]


@dataclass(kw_only=True)
class TrainConfig:
    """Settings of the `Trainer`.

    Args:
        steps: total number of optimizer steps.
        num_epochs: passes over a loader that ends; the training ends after the last one or after
            `steps`, whichever comes first (default: 1). Loaders of bmforge do not end.
        seed: random seed of dropout; weights and sample order have their own seeds.
        precision: fp32, or bf16 / fp16 compute with fp32 parameters; must match the model.
        master_weights: upcast trained 16-bit parameters to fp32 (default: on); off trains them in
            16 bits, which loses updates below 1/256 of a bf16 weight.
        disable_dropout: train in evaluation mode, without dropout and layer drop (default: off).
        grad_clip: maximum gradient norm; None does not clip.
        spike_sigmas: skip a step whose loss is this many standard deviations above the recent mean;
            None skips non-finite steps only.
        eval_every_steps: steps between evaluations; None evaluates at the end only.
        save_every_steps: steps between checkpoints; None saves at the end only.
        keep_last: number of newest checkpoints to keep.
        keep_every_steps: also keep every checkpoint whose step this divides.
        log_every_steps: steps between log lines.
        profile_steps: number of steps, after the third, to trace into ``run_dir/profile``; 0 traces
            none.
        optim: optimizer settings.
        schedule: learning-rate schedule.
    """

    steps: int = 1000
    num_epochs: int = 1
    seed: int = 0
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    master_weights: bool = True
    disable_dropout: bool = False
    grad_clip: float | None = 1.0
    spike_sigmas: float | None = None
    eval_every_steps: int | None = None
    save_every_steps: int | None = 100
    keep_last: int = 2
    keep_every_steps: int | None = None
    log_every_steps: int = 10
    profile_steps: int = 0
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a number out of range."""
        for name in ("steps", "num_epochs", "log_every_steps", "keep_last"):
            if getattr(self, name) < 1:
                raise ConfigError(f"train.{name}={getattr(self, name)} must be at least 1.")
        for name in ("eval_every_steps", "save_every_steps", "keep_every_steps", "grad_clip"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"train.{name}={value} must be above 0, or None for never.")
        if self.profile_steps < 0:
            raise ConfigError(f"train.profile_steps={self.profile_steps} must be at least 0.")
        if self.profile_steps and self.steps <= SKIPPED_STEPS:
            raise ConfigError(
                f"train.profile_steps={self.profile_steps} has no effect with train.steps="
                f"{self.steps}: the first {SKIPPED_STEPS} steps are not traced."
            )

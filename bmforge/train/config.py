"""Configuration of the training loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from bmforge.errors import ConfigError
from bmforge.train.optim.build import OptimConfig
from bmforge.train.profile import SKIPPED_STEPS
from bmforge.train.schedule import ScheduleConfig
from bmforge.value_ranges import check_values

__all__ = ["TrainConfig"]


@dataclass(kw_only=True)
class TrainConfig:
    """Settings of the `Trainer`.

    Args:
        steps: total number of optimizer steps.
        num_epochs: number of epochs over a finite loader of the Python API; training ends after
            them or after `steps`, whichever comes first. `bmforge train` uses `epochs` instead.
        seed: random seed of dropout; `seed` sets that of the weights, and `data.seed` that of the
            sample order.
        precision: dtype of the computation. In the Python API, it must be the precision with which
            the model was parallelized.
        master_weights: train 16-bit parameters as fp32 copies. If False, they are trained in 16
            bits, which needs less memory but loses updates smaller than 1/256 of a bf16 weight.
        disable_dropout: train without dropout and layer drop.
        grad_clip: maximum gradient norm; None disables clipping.
        spike_sigmas: threshold for skipping a step with a loss spike, in standard deviations of the
            recent losses above their mean (if None: skip only steps with a non-finite loss or
            gradient).
        eval_every_steps: number of steps between evaluations (if None: evaluate only at the end).
        load_best_model_at_end: keep the checkpoint with the lowest evaluation loss and restore its
            weights at the end of the run; requires eval_every_steps.
        early_stopping_patience: number of consecutive evaluations without an improvement after
            which training stops; requires eval_every_steps (if None: train all steps).
        early_stopping_threshold: minimum decrease of the evaluation loss, in nats, that counts as
            an improvement.
        save_every_steps: number of steps between checkpoints; None saves only at the end.
        keep_last: number of most recent checkpoints to keep.
        keep_every_steps: also keep checkpoints whose step is a multiple of this number (if None:
            only the most recent ones).
        log_every_steps: number of steps between log lines.
        profile_steps: number of steps to profile, starting with step 4; traces are written to
            ``run_dir/profile``. 0 disables profiling.
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
    load_best_model_at_end: bool = False
    early_stopping_patience: int | None = None
    early_stopping_threshold: float = 0.0
    save_every_steps: int | None = 100
    keep_last: int = 2
    keep_every_steps: int | None = None
    log_every_steps: int = 10
    profile_steps: int = 0
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    def __post_init__(self) -> None:
        """Raise `ConfigError` for values out of range or without effect."""
        check_values(self, "train.")
        self._check_best()
        if self.profile_steps and self.steps <= SKIPPED_STEPS:
            raise ConfigError(
                f"train.profile_steps={self.profile_steps} has no effect with "
                f"train.steps={self.steps}, because the first {SKIPPED_STEPS} steps are not "
                "traced. Train for more steps, or leave it out."
            )

    def _check_best(self) -> None:
        """Raise `ConfigError` for best-checkpoint settings without effect."""
        for name in ("load_best_model_at_end", "early_stopping_patience"):
            value = getattr(self, name)
            if value and self.eval_every_steps is None:
                raise ConfigError(
                    f"train.{name}={value} needs evaluations during training, but "
                    "train.eval_every_steps is not set. Set train.eval_every_steps."
                )
        if self.early_stopping_threshold and self.early_stopping_patience is None:
            raise ConfigError(
                f"train.early_stopping_threshold={self.early_stopping_threshold} has no effect "
                "without train.early_stopping_patience. Set both, or leave the threshold out."
            )

"""Tracks the best evaluation of a run, for its best checkpoint and for early stopping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from bmforge.errors import ConfigError
from bmforge.logging import get_logger
from bmforge.train.checkpoint.checkpointer import load_checkpoint
from bmforge.train.checkpoint.format import step_name
from bmforge.train.config import TrainConfig
from bmforge.train.offload.states import StateOffload

__all__ = ["BestEvaluation"]


class BestEvaluation:
    """Lowest evaluation loss of a run, its step, and the number of evaluations since then.

    Args:
        config: training settings.
        evaluates: whether the run evaluates the model.
        has_run_dir: whether the run writes checkpoints.

    Raises:
        ConfigError: a setting needs evaluations or checkpoints, and the run has none.
    """

    def __init__(self, config: TrainConfig, evaluates: bool, has_run_dir: bool) -> None:
        self.keeps_checkpoint = config.load_best_model_at_end
        self._patience = config.early_stopping_patience
        self._threshold = config.early_stopping_threshold
        self._loss, self._step, self._misses = float("inf"), 0, 0
        for name in ("load_best_model_at_end", "early_stopping_patience"):
            value = getattr(config, name)
            if value and not evaluates:
                raise ConfigError(
                    f"train.{name}={value} compares evaluations, but this run has no validation "
                    "data. Set data.validation or data.validation_fraction."
                )
        if self.keeps_checkpoint and not has_run_dir:
            raise ConfigError(
                "train.load_best_model_at_end=True needs checkpoints, but the Trainer has no "
                "run_dir. Pass run_dir to the Trainer."
            )

    @property
    def step(self) -> int | None:
        """Step of the best checkpoint, which retention keeps; None if there is none."""
        return self._step if self.keeps_checkpoint and self._step else None

    @property
    def is_exhausted(self) -> bool:
        """Whether the patience of early stopping is used up."""
        return self._patience is not None and self._misses >= self._patience

    def note(self, step: int, loss: float) -> bool:
        """Record an evaluation; return True if the model should be saved as the best one.

        As in transformers, any lower loss is the best one, but only a decrease by more than the
        threshold restarts the patience.

        Args:
            step: number of completed optimizer steps.
            loss: evaluation loss; NaN is not an improvement.
        """
        self._misses = 0 if self._loss - loss > self._threshold else self._misses + 1
        if self.is_exhausted:
            get_logger().info(
                "training stops early at step %d, because %d evaluations did not improve the "
                "evaluation loss %.4f of step %d",
                *(step, self._misses, self._loss, self._step),
            )
        if not loss < self._loss:
            return False
        self._loss, self._step = loss, step
        return self.keeps_checkpoint

    def find_checkpoint(self, directory: Path) -> None:
        """Reset the best evaluation of a resumed run if its checkpoint is missing. Collective."""
        step = self.step
        if step is None or (directory / step_name(step)).is_dir():
            return
        get_logger().warning(
            (
                "the best checkpoint so far, of step %d, is missing in %s, so only checkpoints "
                "from now on are compared"
            ),
            *(step, directory),
        )
        self._loss, self._step = float("inf"), 0

    def load_(
        self, model: nn.Module, directory: Path, step: int, offload: StateOffload | None = None
    ) -> None:
        """Load the weights of the best checkpoint at the end of a run. Collective.

        Args:
            model: trained model.
            directory: parent of the checkpoints.
            step: last step of the run; if it is the best step, nothing is loaded.
            offload: optimizer offload, which is finished first because it would overwrite the
                loaded weights; None if there is none.
        """
        if self.step is None or self.step == step:
            return
        if offload is not None:
            offload.restore_()
        best = directory / step_name(self.step)
        load_checkpoint(best, model)
        get_logger().info(
            "loaded the model of step %d, which has the lowest evaluation loss (%.4f)",
            *(self._step, self._loss),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a dict of JSON values."""
        loss = self._loss if self._step else None  # JSON cannot represent infinity
        return {"loss": loss, "step": self._step, "misses": self._misses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of `state_dict`."""
        self._step = int(state["step"])
        self._loss = float(state["loss"]) if self._step else float("inf")
        self._misses = int(state["misses"])

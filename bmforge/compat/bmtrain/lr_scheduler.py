"""BMTrain's learning-rate schedules.

Every schedule except Noam warms up with ``start_lr * num_iter / warmup_iter`` while ``num_iter <
warmup_iter``. After step `end_iter` no schedule increases the rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["Cosine", "Exponential", "Linear", "NoDecay", "Noam", "WarmupLRScheduler"]


class WarmupLRScheduler:
    """Base class of the schedules; each `step` sets the optimizer's learning rate.

    Args:
        optimizer: optimizer whose parameter groups are set.
        start_lr: peak learning rate.
        warmup_iter: number of warm-up steps.
        end_iter: step at which the decay ends.
        num_iter: step to start at.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        start_lr: float,
        warmup_iter: float,
        end_iter: float,
        num_iter: int = 0,
    ) -> None:
        self.start_lr, self.warmup_iter, self.end_iter = start_lr, warmup_iter, end_iter
        self.optimizer, self.num_iter = optimizer, num_iter
        self._current_lr = 0.0
        self.step(num_iter)

    @property
    def current_lr(self) -> float:
        """Current learning rate."""
        return self._current_lr

    def get_lr_warmup(self, num_iter: int) -> float:
        """Return the learning rate of a warm-up step."""
        return self.start_lr * num_iter / self.warmup_iter

    def get_lr_decay(self, num_iter: int) -> float:
        """Return the learning rate of a step after warm-up."""
        raise TypeError(
            f"{type(self).__name__} does not define get_lr_decay. Use one of {__all__[:-1]}."
        )

    def get_lr(self) -> float:
        """Return the learning rate of step `num_iter`."""
        warms = self.num_iter < self.warmup_iter
        return (self.get_lr_warmup if warms else self.get_lr_decay)(self.num_iter)

    def step(self, num_iter: int | None = None) -> None:
        """Advance to the next step, or to `num_iter`, and set the learning rate."""
        self.num_iter = self.num_iter + 1 if num_iter is None else num_iter
        self._current_lr = float(self.get_lr())
        for group in self.optimizer.param_groups:
            group["lr"] = self._current_lr

    def state_dict(self) -> dict[str, Any]:
        """Return all fields of the schedule except the optimizer."""
        return {key: value for key, value in vars(self).items() if key != "optimizer"}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the fields that `state_dict` returned, and set the learning rate."""
        vars(self).update(state_dict)
        self.step(self.num_iter)

    def _progress(self, num_iter: int) -> float:
        """Return the completed fraction of the decay, from 0 to 1."""
        length = max(1.0, self.end_iter - self.warmup_iter)
        return min(1.0, (num_iter - self.warmup_iter) / length)


class NoDecay(WarmupLRScheduler):
    """Constant learning rate after warm-up."""

    def get_lr_decay(self, num_iter: int) -> float:
        """Return the peak learning rate."""
        return self.start_lr


class Linear(WarmupLRScheduler):
    """Linear decay to 0 at step `end_iter`, after warm-up."""

    def get_lr_decay(self, num_iter: int) -> float:
        """Return ``start_lr * (end_iter - num_iter) / (end_iter - warmup_iter)``, at least 0."""
        return self.start_lr * (1.0 - self._progress(num_iter))


class Cosine(WarmupLRScheduler):
    """Cosine decay to 0 at step `end_iter`, after warm-up."""

    def get_lr_decay(self, num_iter: int) -> float:
        """Return ``start_lr * (1 + cos(pi * progress)) / 2``; `progress` is 1 at `end_iter`."""
        return self.start_lr * 0.5 * (1.0 + math.cos(math.pi * self._progress(num_iter)))


class Exponential(WarmupLRScheduler):
    """Exponential decay after warm-up.

    Args:
        gamma: factor per step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        start_lr: float,
        warmup_iter: float,
        end_iter: float,
        num_iter: int = 0,
        gamma: float = 0.95,
    ) -> None:
        self.gamma = gamma
        super().__init__(optimizer, start_lr, warmup_iter, end_iter, num_iter)

    def get_lr_decay(self, num_iter: int) -> float:
        """Return ``start_lr * gamma ** (num_iter - warmup_iter)``."""
        return self.start_lr * self.gamma ** (num_iter - self.warmup_iter)


class Noam(WarmupLRScheduler):
    """Decay by 1 / sqrt(num_iter), as in "Attention is all you need"; `end_iter` is not used."""

    def get_lr_warmup(self, num_iter: int) -> float:
        """Return ``start_lr * num_iter / warmup_iter ** 1.5``."""
        return self.start_lr / math.sqrt(self.warmup_iter) * num_iter / self.warmup_iter

    def get_lr_decay(self, num_iter: int) -> float:
        """Return ``start_lr / sqrt(num_iter)``."""
        return self.start_lr / math.sqrt(max(1, num_iter))

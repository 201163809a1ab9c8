"""Length of a run in epochs instead of steps."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from bmforge.errors import ConfigError
from bmforge.logging import get_logger

__all__ = ["resolve_epochs"]

# With the default learning rates, fewer steps hardly train an adapter; published recipes use at
# least 50.
_FEW_STEPS = 20


def resolve_epochs(config: Any, epoch_rows: int | None) -> Any:
    """Return the config of a run with ``train.steps`` computed from ``epochs``, if that is set.

    Args:
        config: the run's config.
        epoch_rows: number of training sequences per epoch; None if the data has no epochs.

    Raises:
        ConfigError: the task's data has no epochs.
    """
    if config.epochs is None:
        return config
    if epoch_rows is None:
        raise ConfigError(
            f"epochs={config.epochs} has no effect, because the data of this task is endless. "
            "Set train.steps (--steps) instead."
        )
    batch = config.data.global_batch_size
    steps = max(1, math.ceil(config.epochs * epoch_rows / batch))
    get_logger().info(
        "%g epochs of %d sequences, %d sequences per step: %d steps",
        config.epochs,
        epoch_rows,
        batch,
        steps,
    )
    if steps < _FEW_STEPS:
        get_logger().info(
            (
                "%d steps are few: raise --epochs or lower --batch-size to train longer on a small "
                "file"
            ),
            steps,
        )
    return dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps))

"""Checks, before the model is built, that a run can be resumed with its data."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from bmforge.errors import CheckpointError
from bmforge.train.batch_reader import restarts_order
from bmforge.train.checkpoint.format import find_checkpoints, read_manifest

__all__ = ["check_resumed_data"]


def check_resumed_data(run_dir: Path, loader: Any, overridden: Collection[str]) -> None:
    """Raise `ConfigError` if the newest checkpoint of a run was trained on other data.

    The trainer performs the same check when it loads the checkpoint. This function is called
    earlier, before the model is built and files that depend on the data are written.

    Args:
        run_dir: directory of the run.
        loader: the run's loader; nothing is checked if it has no method `check_state`.
        overridden: fields and tables of the run that the user has changed intentionally.
    """
    check = getattr(loader, "check_state", None)
    if check is None or restarts_order(overridden):
        return
    for path in find_checkpoints(run_dir / "checkpoints"):
        try:
            state = read_manifest(path)["state"]
        except CheckpointError:  # the trainer reports this, and tries the next older checkpoint
            continue
        check(state["loader"])
        return

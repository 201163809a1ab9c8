"""Deletes old checkpoints and leftovers of killed processes."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from bmforge.logging import get_logger
from bmforge.train.checkpoint.format import (
    TEMPORARY_PREFIX,
    find_checkpoints,
    step_name,
    step_of,
    verify_checkpoint,
)
from bmforge.train.checkpoint.frozen import sweep_frozen
from bmforge.train.checkpoint.write import Fault, no_fault

__all__ = ["Retention", "clean_leftovers", "make_room", "remove_old"]


@dataclass(frozen=True)
class Retention:
    """Rules for keeping checkpoints.

    Args:
        keep_last: number of newest checkpoints to keep.
        keep_every: also keep checkpoints whose step is a multiple of this number; None to disable.
        keep_step: also keep the checkpoint of this step, such as the best one; None to disable.
    """

    keep_last: int
    keep_every: int | None = None
    keep_step: int | None = None

    def keeps(self, step: int) -> bool:
        """Return True if a checkpoint is kept even if it is not among the newest."""
        divides = self.keep_every is not None and step % self.keep_every == 0
        return divides or step == self.keep_step


def remove_old(directory: Path, step: int, retention: Retention, fault: Fault = no_fault) -> None:
    """Remove the checkpoints that the rules do not keep, and unused files of frozen tensors.

    A file of frozen tensors (`frozen.py`) is unused if no remaining checkpoint refers to it.
    The checkpoint of `step` is kept, and so are later ones: the run has not reached these steps
    again yet.

    Args:
        directory: parent of the step directories.
        step: step of the newest checkpoint.
        retention: rules for keeping checkpoints.
        fault: test hook, called with the names of two phases, to kill a process there.
    """
    past = [path for path in find_checkpoints(directory) if (step_of(path) or 0) <= step]
    for path in past[retention.keep_last :]:
        if retention.keeps(step_of(path) or 0):
            continue
        # Deleting a directory is not atomic. Renaming it first ensures that a process killed during
        # the deletion leaves no step directory with missing files; `clean_leftovers` removes the
        # rest.
        doomed = directory / f"{TEMPORARY_PREFIX}removing-{path.name}-{os.urandom(4).hex()}"
        path.rename(doomed)
        fault("retention-renamed")
        shutil.rmtree(doomed)
        fault("retention-deleted")
    # After the deletions: a shared file is unused only once the last checkpoint that names it is
    # gone.
    sweep_frozen(directory, directory / step_name(step))


def make_room(directory: Path, step: int, retention: Retention) -> bool:
    """Free disk space before the checkpoint of `step` is written; return True if any was freed.

    Removes the checkpoints that `remove_old` would remove afterwards, except one valid checkpoint.
    """
    paths = find_checkpoints(directory)
    past = [path for path in paths if (step_of(path) or 0) <= step]
    if len(past) < 2:
        return False
    # If the next save fails too, the run can resume only from this checkpoint, so nothing is
    # deleted unless it is intact.
    verify_checkpoint(past[0])
    # The checkpoint to be written counts as one of `keep_last`, so one fewer is kept now.
    fewer = replace(retention, keep_last=max(1, retention.keep_last - 1))
    remove_old(directory, step, fewer)
    gone = [path.name for path in paths if not path.exists()]
    if gone:
        get_logger().warning(
            "the disk has no space for another checkpoint, so %s was removed before saving %s",
            *(", ".join(gone), step_name(step)),
        )
    return bool(gone)


def clean_leftovers(directory: Path) -> None:
    """Remove the temporary directories of killed processes."""
    if not directory.is_dir():
        return
    for path in directory.glob(f"{TEMPORARY_PREFIX}*"):
        get_logger().debug("removing the leftover %s", path)
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

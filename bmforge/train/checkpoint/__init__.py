"""Checkpoints: the resumable state of a run; start reading at `checkpointer.py`."""

from bmforge.train.checkpoint.checkpointer import (
    FAULT_POINTS,
    Base,
    Checkpointer,
    DamagedCheckpointError,
    find_checkpoints,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)

__all__ = [
    "FAULT_POINTS",
    "Base",
    "Checkpointer",
    "DamagedCheckpointError",
    "find_checkpoints",
    "load_checkpoint",
    "save_checkpoint",
    "verify_checkpoint",
]

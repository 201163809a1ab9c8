"""Checkpoints: the resumable state of a run; start reading at `checkpointer.py`."""

"""Optimizers whose state lives on the host or on disk; start reading at `states.py`."""

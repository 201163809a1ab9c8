"""Optimizers whose state is on the host or on disk; start reading at `states.py`."""

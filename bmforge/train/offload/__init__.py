"""Optimizers whose state is offloaded to the host or to disk; start reading at `states.py`."""

"""Optimizers and parameter groups; start reading at `build.py`."""

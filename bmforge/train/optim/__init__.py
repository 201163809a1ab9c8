"""Optimizers and which parameter goes to which; start reading at `build.py`."""

"""Tensor and sequence parallelism; start at `cuts.py`."""

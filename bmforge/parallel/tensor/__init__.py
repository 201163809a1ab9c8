"""Tensor and sequence parallelism; start reading at `cuts.py`."""

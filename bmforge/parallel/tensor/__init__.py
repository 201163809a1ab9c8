"""Tensor and sequence parallelism; start at `sharding.py`."""

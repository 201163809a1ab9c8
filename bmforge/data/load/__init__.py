"""Loads batches from token stores in a reproducible order; start reading at `loader.py`."""

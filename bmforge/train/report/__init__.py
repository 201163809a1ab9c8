"""Metrics and HTML report of a run; `inspect.py` computes statistics of a model's tensors."""

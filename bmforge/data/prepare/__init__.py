"""Prepares token stores from raw text; start reading at `run.py`."""

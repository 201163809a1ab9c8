"""Converts raw text to token stores: clean, deduplicate, split, tokenize; start at `run.py`."""

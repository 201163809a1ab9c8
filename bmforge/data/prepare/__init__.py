"""Converts raw text into token stores: clean, deduplicate, split, tokenize; start at `run.py`."""

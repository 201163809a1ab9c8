"""From raw text to token stores; start reading at `run.py`."""

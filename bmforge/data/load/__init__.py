"""From token stores to batches, in an order that depends on nothing; start at `loader.py`."""

"""Token stores, and block datasets of older tools; start reading at `token_store.py`."""

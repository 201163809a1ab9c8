"""Estimates memory and time of layouts on machines that need not exist; start at `search.py`."""

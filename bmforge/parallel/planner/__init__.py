"""Estimates the memory and step time of layouts without the hardware; start at `search.py`."""

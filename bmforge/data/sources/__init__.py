"""Reads text from files of many kinds; start at `files.py`, the table is in `kinds.py`."""

"""Reads text from files of many formats; start at `files.py`, the table is in `kinds.py`."""

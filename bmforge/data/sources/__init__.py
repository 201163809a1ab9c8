"""Readers of text from many file formats; `files.py` is the entry, `kinds.py` the table."""

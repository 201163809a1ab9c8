"""Readers of text from many file formats; start at `files.py`; `kinds.py` lists the formats."""

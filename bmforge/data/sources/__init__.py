"""Where text comes from: files of several forms, plain and packed; start reading at `files.py`."""

"""What a layout would need on machines that are not here; start reading at `search.py`."""

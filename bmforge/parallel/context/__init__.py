"""Context parallelism: the tokens of a row divided over processes; start reading at `divide.py`."""

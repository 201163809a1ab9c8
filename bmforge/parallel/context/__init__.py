"""Context parallelism: the tokens of each sequence are sharded; start reading at `divide.py`."""

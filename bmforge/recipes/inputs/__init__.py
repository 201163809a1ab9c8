"""Training data of runs: prepared corpora, examples, pieces of documents; start at `corpus.py`."""

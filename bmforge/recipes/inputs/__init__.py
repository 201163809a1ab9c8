"""What runs read: prepared corpora, examples, pieces of documents; start at `corpus.py`."""

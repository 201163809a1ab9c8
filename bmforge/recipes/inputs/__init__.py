"""Training data of runs: prepared corpora, examples, and segments of documents.

Start reading at `corpus.py`.
"""

"""Training data of runs: prepared corpora, examples, and pieces of documents.

Start reading at `corpus.py`.
"""

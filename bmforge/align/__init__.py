"""Post-training: preference optimization and reward models, on any model and layout.

Start reading at `scoring.py`, which computes log-probabilities of tokens.
"""

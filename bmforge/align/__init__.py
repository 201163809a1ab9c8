"""Post-training on any model and layout: preferences, reward models, reinforcement learning.

Start reading at `scoring.py`, which computes log-probabilities of tokens; for reinforcement
learning, at `rollouts.py`.
"""

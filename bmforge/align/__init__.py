"""Post-training: preferences, reward models and reinforcement learning, on any model and layout.

Start reading at `scoring.py`, which computes log-probabilities of tokens; for reinforcement
learning, at `rollouts.py`.
"""

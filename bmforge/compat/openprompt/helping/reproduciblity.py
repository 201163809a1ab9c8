"""Alias of `set_seed` at OpenPrompt's (misspelled) import path."""

from __future__ import annotations

import random

import numpy as np
import torch

__all__ = ["set_seed"]


def set_seed(seed: int | None) -> None:
    """Seed the generators of Python, NumPy and torch; if None, do nothing."""
    if seed is None:
        return
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)

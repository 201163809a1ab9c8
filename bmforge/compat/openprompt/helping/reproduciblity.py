"""OpenPrompt's module path of `set_seed`, with its spelling."""

from __future__ import annotations

import random

import numpy as np
import torch

__all__ = ["set_seed"]


def set_seed(seed: int | None) -> None:
    """Seed Python's, NumPy's and torch's generators; None seeds none."""
    if seed is None:
        return
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)

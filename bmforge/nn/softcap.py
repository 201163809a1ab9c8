"""Soft caps of attention scores and logits (Bello et al. 2016; Gemma 2)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["apply_softcap"]


def apply_softcap(x: Tensor, softcap: float | None) -> Tensor:
    """Return ``softcap * tanh(x / softcap)``, or `x` if there is no cap."""
    return x if softcap is None else torch.tanh(x / softcap) * softcap

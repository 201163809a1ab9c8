"""Making a model small: quantise, prune, distil and turn into experts, in any combination.

Start reading at `method.py` (what all ways have in common); `distill/` lets a model learn from
another one.
"""

from bmforge.compress.distill import DistillConfig, Distiller, DistillLoss
from bmforge.compress.method import Method, MethodBase

__all__ = [
    "DistillConfig",
    "DistillLoss",
    "Distiller",
    "Method",
    "MethodBase",
]

"""Making a model small: quantise, prune, distil and turn into experts, in any combination.

Start reading at `method.py` (what all ways have in common).
"""

from bmforge.compress.method import Method, MethodBase

__all__ = [
    "Method",
    "MethodBase",
]

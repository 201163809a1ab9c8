"""Finds duplicates: exact duplicates, near duplicates, repeated spans, and test examples.

Start reading at `near.py`; `tokens.py` defines the tokens by which texts are compared.
"""

from __future__ import annotations

from bmforge.data.dedup.minhash import DedupConfig
from bmforge.data.dedup.near import find_near_duplicates
from bmforge.data.dedup.overlap import OverlapIndex, find_overlap
from bmforge.data.dedup.spans import cut_spans, find_repeated_spans

__all__ = [
    "DedupConfig",
    "find_near_duplicates",
    "find_repeated_spans",
    "cut_spans",
    "OverlapIndex",
    "find_overlap",
]

"""BMInf's names over bmforge: its programs run with their import line changed.

Start reading at `wrap` (`wrapper`, which puts a limit on any module), then `blocks` and `linear`
(what it puts in), `models` (CPM-1, CPM-2 and EVA of BMInf 1.0) and `torch` (their differentiable
forms). What changed, and why, is in docs/migrating_bminf.md.
"""

from __future__ import annotations

from bmforge.compat.bminf import models
from bmforge.compat.bminf.blocks import TransformerBlockList
from bmforge.compat.bminf.linear import QuantizedLinear
from bmforge.compat.bminf.names import NAMES
from bmforge.compat.bminf.wrap import wrapper
from bmforge.compat.names import missing_names

__all__ = ["QuantizedLinear", "TransformerBlockList", "models", "wrapper"]

__getattr__ = missing_names("bminf", NAMES, __all__, "")

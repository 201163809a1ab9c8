"""BMInf's API over bmforge, for programs with changed import lines.

Start at `wrap` (`wrapper` limits the memory of any module), then `blocks` and `linear`, which it
uses, `models` (CPM-1, CPM-2 and EVA of BMInf 1.0) and `torch` (their differentiable forms).
docs/migrating/bminf.md lists every difference and its reason.
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

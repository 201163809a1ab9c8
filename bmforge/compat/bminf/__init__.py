"""BMInf's API, implemented with bmforge, for programs that only change their imports.

Start at `wrap` (`wrapper` limits the memory of any module), then `models` (CPM-1, CPM-2 and EVA of
BMInf 1.0) and `torch` (their differentiable forms).
docs/migrating/bminf.md lists every difference and its reason.
"""

import importlib

from bmforge.compat.bminf import models
from bmforge.compat.bminf.wrap import QuantizedLinear, TransformerBlockList

# Import the module `wrapper` first, as a later import would replace the function.
importlib.import_module("bmforge.compat.bminf.wrapper")
from bmforge.compat.bminf.wrap import wrapper  # noqa: E402

__all__ = ["QuantizedLinear", "TransformerBlockList", "models", "wrapper"]

"""Low-memory inference engine: runs a model of any size within a memory budget.

Start reading at `engine.py` (public API), then `budget.py` (placement) and `weights.py` (loading);
`workspace.py` estimates activations, `native_step.py` runs all blocks for a few tokens in one C++
call (the C++ decoding step), `encode.py` serves encoders, `span_filling.py` fills masked spans.

Batched requests: `request.py` (public types), `requests.py` (engine thread), `scheduler.py` over
`pages.py` (continuous batching), `packed_step.py` (one step of a batch), `answers.py` (output);
`rows.py` runs requests that cannot be batched.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the exports that `__getattr__` imports
    from bmforge.infer.engine.budget import EngineConfig, MemoryPlan
    from bmforge.infer.engine.constraint import Constraint
    from bmforge.infer.engine.engine import Engine
    from bmforge.infer.engine.request import (
        Completion,
        Handle,
        OutputDelta,
        Request,
        RequestsConfig,
        RequestsStatus,
        TokenLogprob,
    )

__all__ = [
    "Completion",
    "Constraint",
    "Engine",
    "EngineConfig",
    "Handle",
    "MemoryPlan",
    "OutputDelta",
    "Request",
    "RequestsConfig",
    "RequestsStatus",
    "TokenLogprob",
]

# Module of each export. Other modules of `infer` import single modules of this package, which
# import them in turn, so nothing is imported before it is used.
_MODULES = {
    **dict.fromkeys(("EngineConfig", "MemoryPlan"), "budget"),
    "Constraint": "constraint",
    "Engine": "engine",
    **dict.fromkeys(("Completion", "Handle", "OutputDelta", "Request"), "request"),
    **dict.fromkeys(("RequestsConfig", "RequestsStatus", "TokenLogprob"), "request"),
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first accessed."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)

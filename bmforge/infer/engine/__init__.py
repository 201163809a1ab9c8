"""The low-memory runtime: a model of any size in a budget of bytes.

Start reading at `engine.py` (what it does), then `budget.py` (what goes where) and `weights.py`
(how it gets there); `workspace.py` says what a step needs, `native_step.py` runs blocks for a few
tokens by one call, `encode.py` is for encoders, `blanks.py` for texts with holes.

Many requests at once: `request.py` (what is asked), `requests.py` (the thread that answers),
`scheduler.py` over `pages.py` (whose turn it is), `packed_step.py` (one step for all), `answers.py`
(what is written); `rows.py` is for what cannot share a step.
"""

from bmforge.infer.engine.budget import EngineConfig, MemoryPlan
from bmforge.infer.engine.constraint import Constraint
from bmforge.infer.engine.engine import Engine
from bmforge.infer.engine.request import (
    Completion,
    Handle,
    Piece,
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
    "Piece",
    "Request",
    "RequestsConfig",
    "RequestsStatus",
    "TokenLogprob",
]

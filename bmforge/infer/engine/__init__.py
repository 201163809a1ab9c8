"""The low-memory runtime: a model of any size in a budget of bytes.

Start reading at `engine.py` (what it does), then `budget.py` (what goes where) and `weights.py`
(how it gets there); `workspace.py` says what a step needs, `native_step.py` runs blocks for a few
tokens by one call, `encode.py` is for encoders, `blanks.py` for texts with holes.
"""

from bmforge.infer.engine.budget import EngineConfig, MemoryPlan
from bmforge.infer.engine.engine import Engine

__all__ = ["Engine", "EngineConfig", "MemoryPlan"]

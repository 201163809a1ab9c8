"""Text generation and scoring with trained models and a KV cache.

Start reading at `generation.py`: `decoder.py` runs the model, `sampling.py` turns logits into
tokens and `beam.py` implements beam search. Results equal those of transformers' ``generate`` on
the same weights. `score.py` computes likelihoods of texts, `conversation.py` opens conversations,
and `openbmb/` implements EVA's conversations and CPM-Bee's documents. `engine/` batches requests
and streams models that do not fit into device memory.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the exports that `__getattr__` imports
    from bmforge.infer.cache import KVCache
    from bmforge.infer.engine import (
        Completion,
        Constraint,
        Engine,
        EngineConfig,
        Request,
        RequestsConfig,
    )
    from bmforge.infer.generation import generate
    from bmforge.infer.options import GenerationConfig

__all__ = [
    "Completion",
    "Constraint",
    "Engine",
    "EngineConfig",
    "GenerationConfig",
    "KVCache",
    "Request",
    "RequestsConfig",
    "generate",
]

# Module of each export. Sampling or the KV cache alone do not need the engine, which is imported
# when it is first used.
_MODULES = {
    **dict.fromkeys(("Completion", "Constraint", "Engine", "EngineConfig"), "engine"),
    **dict.fromkeys(("Request", "RequestsConfig"), "engine"),
    "GenerationConfig": "options",
    "KVCache": "cache",
    "generate": "generation",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first accessed."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)

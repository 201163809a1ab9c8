"""Running trained models: text generation with a key-value cache.

Start reading at `generate.py`: `decoder.py` runs the model, `sampling.py` turns scores into tokens
and `beam.py` searches. Results equal those of transformers' ``generate`` on the same weights.
`score.py` chooses among texts, `talk.py` talks; `openbmb/` holds EVA's conversations and CPM-Bee's
documents. `engine/` runs what does not fit into memory.
"""

from bmforge.infer.cache import KVCache
from bmforge.infer.engine import (
    Completion,
    Constraint,
    Engine,
    EngineConfig,
    Request,
    RequestsConfig,
)
from bmforge.infer.generate import generate
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

"""Text generation and scoring with trained models and a KV cache.

Start reading at `generate.py`: `decoder.py` runs the model, `sampling.py` turns logits into tokens
and `beam.py` implements beam search. Results equal those of transformers' ``generate`` on the same
weights. `score.py` computes likelihoods of texts and `conversation.py` opens conversations;
`openbmb/` implements EVA's conversations and CPM-Bee's documents. `engine/` batches requests and
streams models that do not fit into device memory.
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

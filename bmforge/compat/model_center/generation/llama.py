"""Text generation with Llama."""

from __future__ import annotations

from bmforge.compat.model_center.generation.search import BeamSearch as LlamaBeamSearch
from bmforge.compat.model_center.generation.search import RandomSampling as LlamaRandomSampling

__all__ = ["LlamaBeamSearch", "LlamaRandomSampling"]

"""Text generation with Llama."""

from __future__ import annotations

from bmforge.compat.model_center.generation.search import BeamSearch, RandomSampling
from bmforge.compat.model_center.names import NAMES
from bmforge.compat.names import missing_names

__all__ = ["LlamaBeamSearch", "LlamaRandomSampling"]

__getattr__ = missing_names("model_center", NAMES, __all__, "generation.llama")


class LlamaBeamSearch(BeamSearch):
    """Beam search with Llama; see `BeamSearch`."""


class LlamaRandomSampling(RandomSampling):
    """Sampling with Llama; see `RandomSampling`."""

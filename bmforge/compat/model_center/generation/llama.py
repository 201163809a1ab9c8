"""Text generation with Llama."""

from __future__ import annotations

from bmforge.compat.model_center.generation.search import BeamSearch, RandomSampling

__all__ = ["LlamaBeamSearch", "LlamaRandomSampling"]


class LlamaBeamSearch(BeamSearch):
    """Beam search with Llama; see `BeamSearch`."""


class LlamaRandomSampling(RandomSampling):
    """Sampling with Llama; see `RandomSampling`."""

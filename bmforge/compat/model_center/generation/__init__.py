"""Text generation with Llama and T5 under ModelCenter's names.

Start at `search.py`; `llama.py` and `t5.py` define the names.
"""

from __future__ import annotations

from bmforge.compat.model_center.generation.llama import LlamaBeamSearch, LlamaRandomSampling
from bmforge.compat.model_center.generation.t5 import T5BeamSearch, T5RandomSampling

__all__ = ["LlamaBeamSearch", "LlamaRandomSampling", "T5BeamSearch", "T5RandomSampling"]

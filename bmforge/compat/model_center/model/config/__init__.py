"""ModelCenter's configs, each of which wraps the bmforge config of the family.

Start at `base.py`; `families.py` has the families.
"""

from __future__ import annotations

from bmforge.compat.model_center.model.config.base import OLD_NAMES, Config
from bmforge.compat.model_center.model.config.families import (
    BertConfig,
    CPM1Config,
    CPM2Config,
    CPM3Config,
    EVAConfig,
    GLMConfig,
    GPT2Config,
    GPTjConfig,
    LlamaConfig,
    LongformerConfig,
    MiniCPMConfig,
    MixtralConfig,
    OPTConfig,
    QwenConfig,
    RobertaConfig,
    T5Config,
    ViTConfig,
    VitConfig,
)

__all__ = [
    "OLD_NAMES",
    "BertConfig",
    "CPM1Config",
    "CPM2Config",
    "CPM3Config",
    "Config",
    "EVAConfig",
    "GLMConfig",
    "GPT2Config",
    "GPTjConfig",
    "LlamaConfig",
    "LongformerConfig",
    "MiniCPMConfig",
    "MixtralConfig",
    "OPTConfig",
    "QwenConfig",
    "RobertaConfig",
    "T5Config",
    "ViTConfig",
    "VitConfig",
]

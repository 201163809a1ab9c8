"""XLM-RoBERTa (Conneau et al., "Unsupervised Cross-lingual Representation Learning", 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from bmforge.models.encoder_config import encoder_size
from bmforge.models.heads import Head
from bmforge.models.roberta import Roberta, RobertaConfig, roberta_heads

__all__ = ["XLMRoberta", "XLMRobertaConfig"]


@dataclass(kw_only=True)
class XLMRobertaConfig(RobertaConfig):
    """Config of XLM-RoBERTa; the fields are those of `RobertaConfig`."""

    family: ClassVar[str] = "xlm-roberta"
    heads: ClassVar[dict[str, Head]] = roberta_heads("XLMRoberta")
    hf_defaults: ClassVar[dict[str, Any]] = {**RobertaConfig.hf_defaults, "vocab_size": 30522}
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "xlm-roberta-base": encoder_size(),
        "xlm-roberta-large": encoder_size(1024, 24, 16),
    }
    hub_ids: ClassVar[dict[str, str]] = {
        "xlm-roberta-base": "FacebookAI/xlm-roberta-base",
        "xlm-roberta-large": "FacebookAI/xlm-roberta-large",
    }

    vocab_size: int = 250002


class XLMRoberta(Roberta):
    """XLM-RoBERTa: RoBERTa with a different vocabulary."""

    config_class = XLMRobertaConfig

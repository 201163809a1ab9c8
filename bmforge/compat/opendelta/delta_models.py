"""OpenDelta's eight delta models, each of which wraps a bmforge adapter."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from bmforge.compat.opendelta.backbone import zoo_in
from bmforge.compat.opendelta.basemodel import DeltaBase
from bmforge.compat.opendelta.delta_configs import (
    AdapterConfig,
    BitFitConfig,
    CompacterConfig,
    LoraConfig,
    LowRankAdapterConfig,
    ParallelAdapterConfig,
    PrefixConfig,
    SoftPromptConfig,
)
from bmforge.errors import ConfigError

__all__ = [
    "MODELS",
    "AdapterModel",
    "BitFitModel",
    "CompacterModel",
    "LoraModel",
    "LowRankAdapterModel",
    "ParallelAdapterModel",
    "PrefixModel",
    "SoftPromptModel",
]


class LoraModel(DeltaBase):
    """Delta model with LoRA on linear layers."""

    delta_type, config_class = "lora", LoraConfig


class AdapterModel(DeltaBase):
    """Delta model with bottleneck adapters after modules."""

    delta_type, config_class = "adapter", AdapterConfig


class LowRankAdapterModel(DeltaBase):
    """Delta model with bottleneck adapters of low-rank factors."""

    delta_type, config_class = "low_rank_adapter", LowRankAdapterConfig


class CompacterModel(DeltaBase):
    """Delta model with bottleneck adapters of Kronecker products (Compacter)."""

    delta_type, config_class = "compacter", CompacterConfig


class ParallelAdapterModel(DeltaBase):
    """Delta model with bottleneck adapters from one module's input to another's output."""

    delta_type, config_class = "parallel_adapter", ParallelAdapterConfig


class BitFitModel(DeltaBase):
    """Delta model with trained biases, which can be detached."""

    delta_type, config_class = "bitfit", BitFitConfig


class PrefixModel(DeltaBase):
    """Delta model with prefix tuning of every attention layer, for bmforge's models."""

    delta_type, config_class = "prefix", PrefixConfig

    def _more(self, config: Any) -> dict[str, Any]:
        if not config.reparameterize:
            return {}
        if config.embed_dim != config.mid_dim:
            raise ConfigError(
                f"embed_dim={config.embed_dim} and mid_dim={config.mid_dim} must be equal."
            )
        return {"inner": config.mid_dim}


class SoftPromptModel(DeltaBase):
    """Delta model with a soft prompt, for bmforge's models and ModelCenter's classes."""

    delta_type, config_class = "soft_prompt", SoftPromptConfig

    def _more(self, config: Any) -> dict[str, Any]:
        if config.token_init:
            return {"words": tuple(range(config.soft_token_num))}
        return {"std": config.init_range / math.sqrt(3)}

    @classmethod
    def _backbone_of(cls, backbone: nn.Module) -> nn.Module:
        return zoo_in(backbone)


MODELS: dict[str, type[DeltaBase]] = {
    kind.delta_type: kind
    for kind in (
        LoraModel,
        AdapterModel,
        LowRankAdapterModel,
        CompacterModel,
        ParallelAdapterModel,
        BitFitModel,
        PrefixModel,
        SoftPromptModel,
    )
}

"""OpenDelta's eight delta models, each of which wraps a bmforge adapter."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from bmforge.compat.opendelta.backbone import zoo_in
from bmforge.compat.opendelta.basemodel import DeltaBase
from bmforge.compat.opendelta.delta_configs import (
    AdapterConfig,
    BaseDeltaConfig,
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


def _define(name: str, config_class: type[BaseDeltaConfig], what: str) -> type[DeltaBase]:
    """Create the class of a delta type, for types without special methods."""
    attributes = {"delta_type": config_class.delta_type, "config_class": config_class}
    doc = f"Delta model with {what}."
    return type(name, (DeltaBase,), {"__doc__": doc, "__module__": __name__, **attributes})


LoraModel = _define("LoraModel", LoraConfig, "LoRA on linear layers")
AdapterModel = _define("AdapterModel", AdapterConfig, "bottleneck adapters after modules")
LowRankAdapterModel = _define(
    "LowRankAdapterModel", LowRankAdapterConfig, "bottleneck adapters of low-rank factors"
)
CompacterModel = _define(
    "CompacterModel", CompacterConfig, "bottleneck adapters of Kronecker products"
)
ParallelAdapterModel = _define(
    "ParallelAdapterModel",
    ParallelAdapterConfig,
    "bottleneck adapters from one module's input to another's output",
)
BitFitModel = _define("BitFitModel", BitFitConfig, "trained biases, which can be detached")


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

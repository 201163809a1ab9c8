"""OpenDelta's eight delta models, each of which wraps a bmforge adapter.

`AutoDeltaModel` creates one of any type from a config or a directory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from bmforge.compat.opendelta.backbone import zoo_in
from bmforge.compat.opendelta.basemodel import DeltaBase
from bmforge.compat.opendelta.delta_configs import CONFIGS, BaseDeltaConfig, read_config
from bmforge.errors import ConfigError, suggest
from bmforge.tune.delta.files import type_of_delta
from bmforge.tune.delta.opendelta_format import old_type_of

__all__ = [
    "MODELS", "AdapterModel", "BitFitModel", "CompacterModel", "LoraModel", "LowRankAdapterModel",
    "ParallelAdapterModel", "PrefixModel", "SoftPromptModel", "AutoDeltaConfig", "AutoDeltaModel",
]  # fmt: skip


def _define(name: str, delta_type: str, what: str) -> type[DeltaBase]:
    """Create the class of a delta type, for types without special methods."""
    attributes = {"delta_type": delta_type, "config_class": CONFIGS[delta_type]}
    doc = f"Delta model with {what}."
    return type(name, (DeltaBase,), {"__doc__": doc, "__module__": __name__, **attributes})


LoraModel = _define("LoraModel", "lora", "LoRA on linear layers")
AdapterModel = _define("AdapterModel", "adapter", "bottleneck adapters after modules")
LowRankAdapterModel = _define(
    "LowRankAdapterModel", "low_rank_adapter", "bottleneck adapters of low-rank factors"
)
CompacterModel = _define("CompacterModel", "compacter", "bottleneck adapters of Kronecker products")
ParallelAdapterModel = _define(
    "ParallelAdapterModel",
    "parallel_adapter",
    "bottleneck adapters from one module's input to another's output",
)
BitFitModel = _define("BitFitModel", "bitfit", "trained biases, which can be detached")


class PrefixModel(DeltaBase):
    """Delta model with prefix tuning of every attention layer, for bmforge's models."""

    delta_type, config_class = "prefix", CONFIGS["prefix"]

    def _more(self, config: Any) -> dict[str, Any]:
        if not config.reparameterize:
            return {}
        if config.embed_dim != config.mid_dim:
            raise ConfigError(
                f"embed_dim={config.embed_dim} and mid_dim={config.mid_dim} must be equal, "
                "because bmforge has one size for both."
            )
        return {"inner": config.mid_dim}


class SoftPromptModel(DeltaBase):
    """Delta model with a soft prompt, for bmforge's models and ModelCenter's classes."""

    delta_type, config_class = "soft_prompt", CONFIGS["soft_prompt"]

    def _more(self, config: Any) -> dict[str, Any]:
        if config.token_init:
            return {"words": tuple(range(config.soft_token_num))}
        return {"std": config.init_range / math.sqrt(3)}

    @classmethod
    def _backbone_of(cls, backbone: nn.Module) -> nn.Module:
        return zoo_in(backbone)


MODELS = {kind.delta_type: kind for kind in DeltaBase.__subclasses__()}


class AutoDeltaConfig:
    """Creates a config of the class that `delta_type` names."""

    def __init__(self) -> None:
        raise ConfigError(
            "AutoDeltaConfig cannot be created directly. Call AutoDeltaConfig.from_dict or "
            "from_finetuned."
        )

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], **kwargs: Any) -> BaseDeltaConfig:
        """Create a config with the given fields.

        Raises:
            ConfigError: `delta_type` is missing or unknown.
        """
        kind = str({**config_dict, **kwargs}.get("delta_type"))
        if kind not in CONFIGS:
            raise ConfigError(
                f"unknown delta type: delta_type={kind!r} (supported: "
                f"{', '.join(CONFIGS)}).{suggest(kind, CONFIGS)}"
            )
        return CONFIGS[kind].from_dict(config_dict, **kwargs)

    @classmethod
    def from_finetuned(
        cls, finetuned_model_name_or_path: str | Path, **kwargs: Any
    ) -> BaseDeltaConfig:
        """Read the config in a directory that `save_finetuned` wrote."""
        return cls.from_dict(read_config(finetuned_model_name_or_path), **kwargs)


class AutoDeltaModel:
    """Creates a delta model of the class that a config or a directory names."""

    def __init__(self) -> None:
        raise ConfigError(
            "AutoDeltaModel cannot be created directly. Call AutoDeltaModel.from_config or "
            "from_finetuned."
        )

    @classmethod
    def from_config(
        cls, config: BaseDeltaConfig, backbone_model: nn.Module, **kwargs: Any
    ) -> DeltaBase:
        """Add a new delta model to a backbone."""
        return MODELS[config.delta_type].from_config(config, backbone_model, **kwargs)

    @classmethod
    def from_finetuned(
        cls, finetuned_model_name_or_path: str | Path, backbone_model: nn.Module, **kwargs: Any
    ) -> DeltaBase:
        """Add a saved delta model to a backbone; see `DeltaBase.from_finetuned`.

        Raises:
            ConfigError: the directory has no delta, or its type did not exist in OpenDelta.
        """
        directory = Path(kwargs.get("cache_dir") or ".") / finetuned_model_name_or_path
        kind = type_of_delta(directory)
        name = old_type_of(kind)
        if name is None:
            raise ConfigError(
                f"{str(directory)!r} contains a {kind.__name__}, a type that OpenDelta does not "
                "support. Use bmforge.tune.delta.load_delta."
            )
        model = MODELS[name]
        return model.from_finetuned(finetuned_model_name_or_path, backbone_model, **kwargs)

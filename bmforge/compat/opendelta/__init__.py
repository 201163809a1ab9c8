"""OpenDelta's API over bmforge's adapters, for programs with changed import lines.

    import bmforge.compat.opendelta as opendelta

Start at `basemodel` (the base class), then `delta_configs` (config fields) and `auto_delta`.
docs/migrating/opendelta.md lists every difference and its reason.
"""

from __future__ import annotations

from bmforge.compat.names import missing_names
from bmforge.compat.opendelta import auto_delta, basemodel, delta_configs, delta_models, utils
from bmforge.compat.opendelta.auto_delta import AutoDeltaConfig, AutoDeltaModel
from bmforge.compat.opendelta.basemodel import DeltaBase
from bmforge.compat.opendelta.delta_configs import BaseDeltaConfig
from bmforge.compat.opendelta.delta_models import (
    AdapterModel,
    BitFitModel,
    CompacterModel,
    LoraModel,
    LowRankAdapterModel,
    ParallelAdapterModel,
    PrefixModel,
    SoftPromptModel,
)
from bmforge.compat.opendelta.names import NAMES
from bmforge.compat.opendelta.visualization import Visualization

__all__ = [
    "AdapterModel",
    "AutoDeltaConfig",
    "AutoDeltaModel",
    "BaseDeltaConfig",
    "BitFitModel",
    "CompacterModel",
    "DeltaBase",
    "LoraModel",
    "LowRankAdapterModel",
    "ParallelAdapterModel",
    "PrefixModel",
    "SoftPromptModel",
    "Visualization",
    "auto_delta",
    "basemodel",
    "delta_configs",
    "delta_models",
    "utils",
]

__getattr__ = missing_names("opendelta", NAMES, __all__, "")

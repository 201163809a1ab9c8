"""OpenDelta's names over bmforge's deltas: its programs run with their import lines changed.

    import bmforge.compat.opendelta as opendelta

Start reading at `basemodel` (what a delta model does), then `delta_configs` (the old fields) and
`auto_delta`. What changed, and why, is in docs/migrating_opendelta.md.
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

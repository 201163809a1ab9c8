"""Alias at BMTrain's import path `layer` of `DistributedModule`; the code is in `module.py`."""

from bmforge.compat.bmtrain.module import DistributedModule
from bmforge.compat.bmtrain.parameter import DistributedParameter

__all__ = ["DistributedModule", "DistributedParameter"]

"""Alias at BMTrain's import path `global_var` of `config`; the code is in `runtime.py`."""

from bmforge.compat.bmtrain.names import NAMES
from bmforge.compat.bmtrain.runtime import config, rank, world_size
from bmforge.compat.names import missing_names

__all__ = ["config", "rank", "world_size"]

__getattr__ = missing_names("bmtrain", NAMES, __all__, "global_var")

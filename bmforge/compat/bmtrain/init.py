"""Alias at BMTrain's import path `init` of `init_distributed`; the code is in `runtime.py`."""

from collections.abc import Mapping
from typing import Any

from bmforge.compat.bmtrain.runtime import Topology, init_distributed, is_initialized

__all__ = ["init_distributed", "is_initialized", "topology"]


def topology(config: Mapping[str, Any]) -> Topology:
    """Return the coordinates of this process on the mesh, as in ``config["topology"]``."""
    sizes = (config[key] for key in ("rank", "pipe_size", "tp_size", "world_size"))
    return Topology(*sizes)

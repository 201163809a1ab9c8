"""Where BMTrain joined its processes; here it is `runtime.py` that does."""

from collections.abc import Mapping
from typing import Any

from bmforge.compat.bmtrain.runtime import Topology, init_distributed, is_initialized

__all__ = ["init_distributed", "is_initialized", "topology"]


def topology(config: Mapping[str, Any]) -> Topology:
    """Return where the process of these settings stands, as ``config["topology"]`` says it."""
    sizes = (config[key] for key in ("rank", "pipe_size", "tp_size", "world_size"))
    return Topology(*sizes)

"""Layouts: how one model lies on many processes, with the same numbers on every one.

Start reading at `parallelize.py` (the one function, in the one order), then `layout.py`. Nothing
here imports `nn` or `models`: what to cut where comes as data (name globs) with the model.
"""

from bmforge.parallel.distributed import (
    World,
    init_distributed,
    run_on_first,
    shutdown_distributed,
)
from bmforge.parallel.layout import Layout, build_mesh, data_parallel_group, data_parallel_size
from bmforge.parallel.parallelize import parallelize
from bmforge.parallel.zero import reshard_

__all__ = [
    "Layout",
    "World",
    "build_mesh",
    "data_parallel_group",
    "data_parallel_size",
    "init_distributed",
    "parallelize",
    "reshard_",
    "run_on_first",
    "shutdown_distributed",
]

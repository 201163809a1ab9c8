"""Parallelism: data, tensor, pipeline, context and expert parallel training of one model.

Start reading at `parallelize.py`, which applies all forms of parallelism in a fixed order, then
`layout.py`. The package does not import `nn` or `models`: a model provides name globs of the
parameters to shard. `plan` (`planner/search.py`) chooses a layout for given machines.
"""

from bmforge.memory.gradients import offloaded_gradient
from bmforge.memory.offload import OffloadConfig
from bmforge.parallel.distributed import (
    World,
    init_distributed,
    joined_world,
    launched_processes,
    run_everywhere,
    run_on_first,
    shutdown_distributed,
)
from bmforge.parallel.failure_detector import FailureDetector
from bmforge.parallel.groups import new_group
from bmforge.parallel.layout import (
    CONTEXT_AXES,
    LOSS_AXES,
    ROW_AXES,
    STAGE_AXES,
    TENSOR_AXES,
    TOKEN_AXES,
    Layout,
    axis_rank,
    axis_size,
    build_mesh,
    counts_here,
    data_parallel_rank,
    data_parallel_size,
    gradient_ranks,
    mesh_of,
    random_stream,
    samples_agree,
    sum_over_axes,
)
from bmforge.parallel.master_weights import is_half, master_weight_problems, upcast_trained_
from bmforge.parallel.parallelize import parallelize
from bmforge.parallel.pipeline.model import pipeline_of, run_step
from bmforge.parallel.planner.hardware import Cluster, find_device
from bmforge.parallel.planner.search import Plan, PlanRequest, plan
from bmforge.parallel.planner.workload import Workload
from bmforge.parallel.zero import reshard_

__all__ = [
    "CONTEXT_AXES",
    "LOSS_AXES",
    "ROW_AXES",
    "STAGE_AXES",
    "TENSOR_AXES",
    "TOKEN_AXES",
    "Cluster",
    "FailureDetector",
    "Layout",
    "OffloadConfig",
    "Plan",
    "PlanRequest",
    "Workload",
    "World",
    "axis_rank",
    "axis_size",
    "build_mesh",
    "counts_here",
    "data_parallel_rank",
    "data_parallel_size",
    "find_device",
    "gradient_ranks",
    "init_distributed",
    "joined_world",
    "launched_processes",
    "is_half",
    "offloaded_gradient",
    "master_weight_problems",
    "mesh_of",
    "new_group",
    "parallelize",
    "pipeline_of",
    "plan",
    "random_stream",
    "samples_agree",
    "reshard_",
    "run_everywhere",
    "run_on_first",
    "run_step",
    "shutdown_distributed",
    "sum_over_axes",
    "upcast_trained_",
]

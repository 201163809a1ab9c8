"""The names of BMTrain 1.0, and the older forms programs still use, over bmforge's engine.

    import bmforge.compat.bmtrain as bmt

Start at `runtime.py` (what init_distributed means), then `parameter.py`, `module.py`, `block.py`
(how parameters are shared out) and `optim/`. docs/migrating.md says what changed, and why.
"""

from typing import Any

from bmforge.compat.bmtrain import debug, distributed, inspect, loss, lr_scheduler, nn, optim, store
from bmforge.compat.bmtrain import printing as utils
from bmforge.compat.bmtrain.block import Block, TransformerBlockList
from bmforge.compat.bmtrain.module import DistributedModule
from bmforge.compat.bmtrain.optim import optim_step
from bmforge.compat.bmtrain.parameter import (
    DistributedParameter,
    ParameterInitializer,
    grouped_parameters,
    init_parameters,
)
from bmforge.compat.bmtrain.pipeline import PipelineTransformerBlockList
from bmforge.compat.bmtrain.printing import (
    gather_result,
    print_block,
    print_dict,
    print_rank,
    see_memory,
    sum_loss,
    wait_loader,
)
from bmforge.compat.bmtrain.runtime import (
    config,
    init_distributed,
    is_initialized,
    rank,
    synchronize,
    world_size,
)
from bmforge.compat.bmtrain.store import load, save
from bmforge.compat.bmtrain.wrapper import BMTrainModelWrapper
from bmforge.errors import suggest

CheckpointBlock = Block

__all__ = [
    "BMTrainModelWrapper",
    "Block",
    "CheckpointBlock",
    "DistributedModule",
    "DistributedParameter",
    "ParameterInitializer",
    "PipelineTransformerBlockList",
    "TransformerBlockList",
    "config",
    "debug",
    "distributed",
    "gather_result",
    "grouped_parameters",
    "init_distributed",
    "init_parameters",
    "inspect",
    "is_initialized",
    "load",
    "loss",
    "lr_scheduler",
    "nn",
    "optim",
    "optim_step",
    "print_block",
    "print_dict",
    "print_rank",
    "rank",
    "save",
    "see_memory",
    "store",
    "sum_loss",
    "synchronize",
    "utils",
    "wait_loader",
    "world_size",
]

# Old names without a counterpart, and what to use.
_GONE = """
nccl: bmt.distributed, or torch.distributed with bmt.config['comm'] and the other groups
load_nccl_pypi: nothing, torch brings its own collectives
benchmark: `bmforge bench`
checkpoint: bmt.CheckpointBlock, or torch.utils.checkpoint
zero_context: bmt.Block, where torch's fully_shard gathers parameters
hook_func: bmt.Block, where torch's fully_shard has the hooks
init: bmt.init_distributed and bmt.config['topology']
global_var: bmt.config
PipeDreamBlockList: bmt.PipelineTransformerBlockList, or bmforge.parallel.Layout(pp=...)
print_rank_pp: bmt.print_rank(..., rank=n)
clean: nothing, processes leave by themselves
"""


def __getattr__(name: str) -> Any:
    """Say what to use instead of an old name that is gone."""
    gone = dict(line.split(": ", 1) for line in _GONE.strip().splitlines())
    if name in gone:
        raise AttributeError(f"bmt.{name} has no counterpart here. Use {gone[name]}.")
    hint = suggest(name, __all__)
    raise AttributeError(f"bmforge.compat.bmtrain has no {name!r}.{hint} See docs/migrating.md.")

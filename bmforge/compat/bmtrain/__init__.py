"""BMTrain 1.0's API, implemented with bmforge, and older forms that programs still use.

    import bmforge.compat.bmtrain as bmt

Start at `runtime.py` (process groups and `config`), then `parameter.py`, `module.py`, `block.py`
(sharding) and `optim/`. docs/migrating/index.md lists every difference and its reason.
"""

from bmforge.compat.bmtrain import (
    benchmark,
    debug,
    distributed,
    inspect,
    loss,
    lr_scheduler,
    nn,
    optim,
    param_init,
    store,
    utils,
)
from bmforge.compat.bmtrain import nccl as nccl
from bmforge.compat.bmtrain.block import Block, TransformerBlockList
from bmforge.compat.bmtrain.module import DistributedModule
from bmforge.compat.bmtrain.optim import optim_step
from bmforge.compat.bmtrain.param_init import grouped_parameters, init_parameters
from bmforge.compat.bmtrain.parameter import DistributedParameter, ParameterInitializer
from bmforge.compat.bmtrain.pipeline import PipelineTransformerBlockList
from bmforge.compat.bmtrain.runtime import (
    config,
    init_distributed,
    is_initialized,
    rank,
    world_size,
)
from bmforge.compat.bmtrain.store import load, save
from bmforge.compat.bmtrain.synchronize import gather_result, sum_loss, synchronize, wait_loader
from bmforge.compat.bmtrain.utils import print_block, print_dict, print_rank, see_memory
from bmforge.compat.bmtrain.wrapper import BMTrainModelWrapper

CheckpointBlock = Block

__all__ = [
    "BMTrainModelWrapper", "Block", "CheckpointBlock", "DistributedModule", "DistributedParameter",
    "ParameterInitializer", "PipelineTransformerBlockList", "TransformerBlockList", "benchmark",
    "config", "debug", "distributed", "gather_result", "grouped_parameters", "init_distributed",
    "init_parameters", "inspect", "is_initialized", "load", "loss", "lr_scheduler", "nn", "optim",
    "optim_step", "param_init", "print_block", "print_dict", "print_rank", "rank", "save",
    "see_memory", "store", "sum_loss", "synchronize", "utils", "wait_loader", "world_size",
]  # fmt: skip

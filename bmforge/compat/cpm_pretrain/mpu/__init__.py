"""Megatron's `mpu`: process groups, tensor-parallel layers, and their collectives.

Start at `initialize.py`, then `layers.py`. `bmforge.parallel.Layout(tp=...)` shards a model without
any of this.
"""

from __future__ import annotations

from bmforge.compat.cpm_pretrain.mpu.cross_entropy import vocab_parallel_cross_entropy
from bmforge.compat.cpm_pretrain.mpu.data import broadcast_data
from bmforge.compat.cpm_pretrain.mpu.grads import clip_grad_norm
from bmforge.compat.cpm_pretrain.mpu.initialize import (
    destroy_model_parallel,
    get_data_parallel_group,
    get_data_parallel_rank,
    get_data_parallel_world_size,
    get_io_parallel_group,
    get_model_parallel_group,
    get_model_parallel_rank,
    get_model_parallel_src_rank,
    get_model_parallel_world_size,
    get_pipe_parallel_group,
    get_pipe_parallel_rank,
    get_pipe_parallel_world_size,
    get_topology,
    initialize_model_parallel,
    is_unitialized,
    model_parallel_is_initialized,
    set_model_parallel_rank,
    set_model_parallel_world_size,
)
from bmforge.compat.cpm_pretrain.mpu.layers import (
    ColumnParallelLinear,
    LayerNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from bmforge.compat.cpm_pretrain.mpu.mappings import (
    copy_to_model_parallel_region,
    gather_from_model_parallel_region,
    reduce_from_model_parallel_region,
    scatter_to_model_parallel_region,
)
from bmforge.compat.cpm_pretrain.mpu.random import (
    checkpoint,
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from bmforge.compat.cpm_pretrain.mpu.utils import divide, split_tensor_along_last_dim
from bmforge.compat.cpm_pretrain.names import NAMES
from bmforge.compat.names import missing_names

__all__ = [
    "ColumnParallelLinear",
    "LayerNorm",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "broadcast_data",
    "checkpoint",
    "clip_grad_norm",
    "copy_to_model_parallel_region",
    "destroy_model_parallel",
    "divide",
    "gather_from_model_parallel_region",
    "get_cuda_rng_tracker",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_io_parallel_group",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_src_rank",
    "get_model_parallel_world_size",
    "get_pipe_parallel_group",
    "get_pipe_parallel_rank",
    "get_pipe_parallel_world_size",
    "get_topology",
    "initialize_model_parallel",
    "is_unitialized",
    "model_parallel_is_initialized",
    "model_parallel_cuda_manual_seed",
    "reduce_from_model_parallel_region",
    "scatter_to_model_parallel_region",
    "set_model_parallel_rank",
    "set_model_parallel_world_size",
    "split_tensor_along_last_dim",
    "vocab_parallel_cross_entropy",
]

__getattr__ = missing_names("cpm_pretrain", NAMES, __all__, "mpu")

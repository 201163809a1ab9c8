"""Dry run of a layout: validates it and counts each process's parameters in one process.

A fake process group replaces the other processes, and a model on the meta device replaces the
weights. So a laptop can build a layout for hundreds of devices with the code of the real run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from bmforge.errors import ConfigError
from bmforge.parallel.layout import Layout, build_mesh
from bmforge.parallel.parallelize import parallelize
from bmforge.parallel.pipeline.model import pipeline_of
from bmforge.shards import local_tensor
from bmforge.surgery import persistent_tensors

__all__ = ["DryRun", "RankMemory", "dry_run", "join_fakes"]


@dataclass(frozen=True)
class RankMemory:
    """Numbers of blocks and parameters of one process.

    Args:
        rank: global rank.
        stages: pipeline stages of the process.
        blocks: number of the process's blocks.
        parameters: number of elements in the process's shards.
        parameter_bytes: size of the process's shards in bytes.
        trained_bytes: size of the shards of trained parameters in bytes.
    """

    rank: int
    stages: tuple[int, ...]
    blocks: int
    parameters: int
    parameter_bytes: int
    trained_bytes: int


@dataclass(frozen=True)
class DryRun:
    """Result of a dry run.

    Args:
        axes: length of every mesh axis, outermost first.
        parameters: number of parameters of the whole model; tied parameters count once.
        holders: number of processes over which one copy of the parameters is sharded.
        shares: memory of the first process of every pipeline rank; that of the rank's other
            processes differs by at most one row per parameter.
    """

    axes: dict[str, int]
    parameters: int
    holders: int
    shares: tuple[RankMemory, ...]


def dry_run(
    build_model: Callable[[], nn.Module], layout: Layout, world_size: int, **options: Any
) -> DryRun:
    """Build a layout for `world_size` processes in a single process, without allocating weights.

    Args:
        build_model: function that builds the model on the meta device; called once per pipeline
            rank.
        layout: degrees of parallelism.
        world_size: number of processes.
        options: further arguments of `parallelize`.

    Raises:
        ConfigError: the layout does not fit (one message lists all problems), or this process has
            already joined a process group.
    """
    if dist.is_initialized():
        raise ConfigError(
            "a dry run cannot run in a process that has joined a process group. Start it "
            "in a separate process."
        )
    # `pp` is the outermost axis, so the processes of a stage are adjacent.
    beside = world_size // layout.pp if layout.pp and world_size % layout.pp == 0 else world_size
    shares, axes, total = [], {}, 0
    for stage in range(max(1, world_size // beside)):
        # A model per stage, because `parallelize` removes the other stages' blocks.
        model = build_model()
        total = sum(tensor.numel() for tensor in persistent_tensors(model).values())
        join_fakes(stage * beside, world_size)
        try:
            mesh = build_mesh(layout)
            parallelize(model, layout, mesh=mesh, **options)
            axes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
            shares.append(_measure(model, stage * beside))
        finally:
            dist.destroy_process_group()
    holders = world_size // layout.dp_replicate if layout.zero else layout.tp * layout.pp
    return DryRun(axes, total, holders, tuple(shares))


def join_fakes(rank: int, world_size: int) -> None:
    """Initialize a fake process group with `world_size` processes."""
    # torch's backend without communication, made for its tests and for memory estimates.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())


def _measure(model: nn.Module, rank: int) -> RankMemory:
    pipeline = pipeline_of(model)
    stages: tuple[int, ...] = (0,)
    if pipeline is not None:
        stages = pipeline.stages_here
    rules: Any = getattr(model, "layout_rules", None)
    stacks = rules().stacks if callable(rules) else ()
    blocks = sum(len(list(model.get_submodule(name).children())) for name in stacks)
    tensors = persistent_tensors(model).values()
    local = [(local_tensor(tensor), tensor.requires_grad) for tensor in tensors]
    sizes = [(tensor.numel() * tensor.element_size(), trained) for tensor, trained in local]
    return RankMemory(
        rank,
        stages,
        blocks,
        sum(tensor.numel() for tensor, _ in local),
        sum(size for size, _ in sizes),
        sum(size for size, trained in sizes if trained),
    )

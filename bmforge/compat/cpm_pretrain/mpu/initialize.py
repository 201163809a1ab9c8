"""Process groups along the axes of a layout's mesh, under mpu's names.

Tensor-parallel ranks vary fastest, then replicas, then pipeline stages, as in the engine's meshes.
`groups` is the only state.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from bmforge.errors import DistributedError
from bmforge.parallel import Layout, build_mesh, init_distributed, new_group

__all__ = [
    "Groups", "destroy_model_parallel", "get_data_parallel_group", "get_data_parallel_rank",
    "get_data_parallel_world_size", "get_io_parallel_group", "get_model_parallel_group",
    "get_model_parallel_rank", "get_model_parallel_src_rank", "get_model_parallel_world_size",
    "get_pipe_parallel_group", "get_pipe_parallel_rank", "get_pipe_parallel_world_size",
    "get_topology", "groups", "initialize_model_parallel", "is_unitialized", "join_layout",
    "model_parallel_is_initialized", "set_model_parallel_rank", "set_model_parallel_world_size",
]  # fmt: skip


class Groups:
    """Process groups that `initialize_model_parallel` creates.

    Attributes:
        mesh: mesh of all axes; None before initialization.
        device: device of this process.
        topology: argument of `initialize_model_parallel`; None without a pipeline.
        io: group of the processes with tensor-parallel rank 0 in the first and last stage; None on
            other processes.
        rank, size: rank and size that a program set; None to use those of the group.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Remove all groups."""
        self._world: object = None
        self.mesh: DeviceMesh | None = None
        self.device = torch.device("cpu")
        self.topology: Any = None
        self.io: dist.ProcessGroup | None = None
        self.rank: int | None = None
        self.size: int | None = None

    @property
    def is_ready(self) -> bool:
        """True if the groups exist and their process group is alive."""
        joined = dist.is_initialized() and self._world is dist.group.WORLD
        return self.mesh is not None and joined

    def take(self, mesh: DeviceMesh, device: torch.device, topology: Any) -> None:
        """Use the process groups of a mesh; `topology` is None without a pipeline."""
        self.mesh, self.device, self.topology = mesh, device, topology
        self._world = dist.group.WORLD
        self.io = _io_group(mesh)

    def of(self, axis: str) -> dist.ProcessGroup:
        """Return the process group along an axis of the mesh: "tp", "pp" or "data".

        Raises:
            DistributedError: `initialize_model_parallel` was not called.
        """
        if self.mesh is None or not self.is_ready:
            raise DistributedError(
                "the groups of mpu are not initialized. Call "
                "mpu.initialize_model_parallel(size), or initialize_megatron(), first."
            )
        if axis == "data":
            axis = "dp_shard" if self.mesh["dp_replicate"].size() == 1 else "dp_replicate"
        return self.mesh.get_group(axis)


groups = Groups()


def _io_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Create the group of the tensor-parallel ranks 0 in the first and last pipeline stage."""
    ends = mesh.mesh.flatten(1, -2)[[0, -1], :, 0].flatten().unique().tolist()
    group = new_group(ends)
    return group if dist.get_rank() in ends else None


def join_layout(layout: Layout, topology: Any = None) -> DeviceMesh:
    """Initialize torch's process group, and use the groups of a layout's mesh; return the mesh."""
    world = init_distributed()
    mesh = build_mesh(layout, world.device)
    groups.take(mesh, world.device, topology)
    return mesh


def initialize_model_parallel(model_parallel_size_: int, topology: Any = None) -> None:
    """Create the process groups.

    Args:
        model_parallel_size_: tensor-parallel size; at most the number of processes.
        topology: topology with the number of stages, see `PipeModelDataParallelTopology`.

    Raises:
        ConfigError: the sizes do not divide the number of processes.
        DistributedError: the groups exist already.
    """
    if groups.is_ready:
        raise DistributedError(
            "the groups of mpu are already initialized. Call mpu.destroy_model_parallel() first."
        )
    world = init_distributed()
    stages = topology.get_dim("pipe") if topology is not None else 1
    size = min(model_parallel_size_, world.size)
    join_layout(Layout(zero=0, tp=size, pp=stages), topology)


def destroy_model_parallel() -> None:
    """Remove the process groups."""
    groups.forget()


def is_unitialized() -> bool:
    """Return True if the process groups do not exist."""
    return not groups.is_ready


def model_parallel_is_initialized() -> bool:
    """Return True if the process groups exist."""
    return groups.is_ready


def get_topology() -> Any:
    """Return the topology given at initialization; None without a pipeline."""
    return groups.topology


def get_model_parallel_group() -> dist.ProcessGroup:
    """Return the tensor-parallel group of this process."""
    return groups.of("tp")


def get_data_parallel_group() -> dist.ProcessGroup:
    """Return the data-parallel group of this process."""
    return groups.of("data")


def get_pipe_parallel_group() -> dist.ProcessGroup:
    """Return the pipeline group of this process."""
    return groups.of("pp")


def get_io_parallel_group() -> dist.ProcessGroup:
    """Return the group of the tensor-parallel ranks 0 in the first and last pipeline stage.

    Raises:
        DistributedError: this process is not in the group.
    """
    if groups.io is None:
        groups.of("tp")
        raise DistributedError(
            "this process has no io group: only tensor-parallel rank 0 of the first and of the "
            "last pipeline stage has one. Call get_io_parallel_group() only on these processes."
        )
    return groups.io


def set_model_parallel_world_size(world_size: int | None) -> None:
    """Override the tensor-parallel size; None to restore the size of the group."""
    groups.size = world_size


def set_model_parallel_rank(rank: int | None) -> None:
    """Override the tensor-parallel rank; None to restore the rank in the group."""
    groups.rank = rank


def get_model_parallel_world_size() -> int:
    """Return the number of processes in the tensor-parallel group."""
    return get_model_parallel_group().size() if groups.size is None else groups.size


def get_model_parallel_rank() -> int:
    """Return this process's rank in the tensor-parallel group."""
    return get_model_parallel_group().rank() if groups.rank is None else groups.rank


def get_model_parallel_src_rank() -> int:
    """Return the global rank of the tensor-parallel group's first process."""
    return dist.get_process_group_ranks(get_model_parallel_group())[0]


def get_data_parallel_world_size() -> int:
    """Return the number of data-parallel replicas."""
    return get_data_parallel_group().size()


def get_data_parallel_rank() -> int:
    """Return this process's rank in the data-parallel group."""
    return get_data_parallel_group().rank()


def get_pipe_parallel_world_size() -> int:
    """Return the number of pipeline stages."""
    return get_pipe_parallel_group().size()


def get_pipe_parallel_rank() -> int:
    """Return this process's pipeline stage."""
    return get_pipe_parallel_group().rank()

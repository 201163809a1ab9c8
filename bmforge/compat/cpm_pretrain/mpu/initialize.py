"""Who shares what: groups of processes along the axes of a layout's mesh, under mpu's names.

Processes of one model are neighbours, replicas of it further apart, pipeline stages furthest, as
the engine's meshes have them too. `groups` is the only state.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from bmforge.compat.cpm_pretrain.names import NAMES
from bmforge.compat.names import missing_names
from bmforge.errors import DistributedError
from bmforge.parallel import Layout, build_mesh, init_distributed, new_group

__all__ = [
    "Groups",
    "destroy_model_parallel",
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
    "groups",
    "initialize_model_parallel",
    "is_unitialized",
    "join_layout",
    "model_parallel_is_initialized",
    "set_model_parallel_rank",
    "set_model_parallel_world_size",
]


class Groups:
    """What `initialize_model_parallel` has made.

    Attributes:
        mesh: of all axes; None before.
        device: what this process computes on.
        topology: as it was given.
        io: the first and the last stage's first processes; None on others.
        rank, size: what a program says instead of the group's; None says nothing.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Have none."""
        self._world: object = None
        self.mesh: DeviceMesh | None = None
        self.device = torch.device("cpu")
        self.topology: Any = None
        self.io: dist.ProcessGroup | None = None
        self.rank: int | None = None
        self.size: int | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the groups have been made, and their processes are still joined."""
        joined = dist.is_initialized() and self._world is dist.group.WORLD
        return self.mesh is not None and joined

    def take(self, mesh: DeviceMesh, device: torch.device, topology: Any) -> None:
        """Take over a mesh."""
        self.mesh, self.device, self.topology = mesh, device, topology
        self._world = dist.group.WORLD
        self.io = _io_group(mesh)

    def of(self, axis: str) -> dist.ProcessGroup:
        """Return the processes that differ from this one on an axis: tp, pp or data.

        Raises:
            DistributedError: `initialize_model_parallel` was not called.
        """
        if self.mesh is None or not self.is_ready:
            raise DistributedError(
                "mpu knows no groups yet: call mpu.initialize_model_parallel(size), or "
                "initialize_megatron(), first."
            )
        if axis == "data":
            axis = "dp_shard" if self.mesh["dp_replicate"].size() == 1 else "dp_replicate"
        return self.mesh.get_group(axis)


groups = Groups()


def _io_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Return the group of the first processes of the first and the last stage."""
    ends = mesh.mesh.flatten(1, -2)[[0, -1], :, 0].flatten().unique().tolist()
    made = new_group(ends)
    return made if dist.get_rank() in ends else None


def join_layout(layout: Layout, topology: Any = None) -> DeviceMesh:
    """Join the other processes and take a layout's groups; return its mesh."""
    world = init_distributed()
    mesh = build_mesh(layout, world.device)
    groups.take(mesh, world.device, topology)
    return mesh


def initialize_model_parallel(model_parallel_size_: int, topology: Any = None) -> None:
    """Make the groups.

    Args:
        model_parallel_size_: processes that share one model's matrices; at most all of them.
        topology: says how many stages a pipeline has, see `PipeModelDataParallelTopology`.

    Raises:
        ConfigError: the sizes do not divide the number of processes.
        DistributedError: the groups are there already.
    """
    if groups.is_ready:
        raise DistributedError(
            "mpu has its groups already: call mpu.destroy_model_parallel() before making others."
        )
    world = init_distributed()
    stages = topology.get_dim("pipe") if topology is not None else 1
    size = min(model_parallel_size_, world.size)
    join_layout(Layout(zero=0, tp=size, pp=stages), topology)


def destroy_model_parallel() -> None:
    """Forget the groups."""
    groups.forget()


def is_unitialized() -> bool:
    """Tell whether there are no groups yet."""
    return not groups.is_ready


def model_parallel_is_initialized() -> bool:
    """Tell whether there are groups."""
    return groups.is_ready


def get_topology() -> Any:
    """Return the topology that was given; None without a pipeline."""
    return groups.topology


def get_model_parallel_group() -> dist.ProcessGroup:
    """Return the processes that share one model's matrices with this one."""
    return groups.of("tp")


def get_data_parallel_group() -> dist.ProcessGroup:
    """Return the processes that hold the same part of the model, for other rows."""
    return groups.of("data")


def get_pipe_parallel_group() -> dist.ProcessGroup:
    """Return this pipeline's processes."""
    return groups.of("pp")


def get_io_parallel_group() -> dist.ProcessGroup:
    """Return the first processes of the first and the last stage.

    Raises:
        DistributedError: this process is none of them.
    """
    if groups.io is None:
        groups.of("tp")
        raise DistributedError(
            "this process is in no io group: only the first processes of the first and the last "
            "stage are. Ask where mpu.get_model_parallel_rank() is 0, on those stages."
        )
    return groups.io


def set_model_parallel_world_size(world_size: int | None) -> None:
    """Say another size than the group's; None: the group's again."""
    groups.size = world_size


def set_model_parallel_rank(rank: int | None) -> None:
    """Say another rank than the group's; None: the group's again."""
    groups.rank = rank


def get_model_parallel_world_size() -> int:
    """Return how many processes share one model's matrices."""
    return get_model_parallel_group().size() if groups.size is None else groups.size


def get_model_parallel_rank() -> int:
    """Return this process's place among them."""
    return get_model_parallel_group().rank() if groups.rank is None else groups.rank


def get_model_parallel_src_rank() -> int:
    """Return the global rank of the first of them."""
    return dist.get_process_group_ranks(get_model_parallel_group())[0]


def get_data_parallel_world_size() -> int:
    """Return how many replicas of the model there are."""
    return get_data_parallel_group().size()


def get_data_parallel_rank() -> int:
    """Return which replica this process is in."""
    return get_data_parallel_group().rank()


def get_pipe_parallel_world_size() -> int:
    """Return how many stages there are."""
    return get_pipe_parallel_group().size()


def get_pipe_parallel_rank() -> int:
    """Return this process's stage."""
    return get_pipe_parallel_group().rank()


__getattr__ = missing_names("cpm_pretrain", NAMES, __all__, "mpu.initialize")

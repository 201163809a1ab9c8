"""Creates process groups and device meshes whose collectives all have the same timeout.

`init_device_mesh` and `new_group` give new groups torch's default timeout, 30 minutes on gloo,
instead of the timeout passed to `init_process_group`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout

__all__ = ["build_device_mesh", "flatten_mesh", "group_timeout", "new_group"]


def group_timeout(group: Any = None) -> timedelta:
    """Return the timeout of the collectives of a process group; None means the default group."""
    group = group or dist.group.WORLD
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            timeout: timedelta = options._timeout
            return timeout
    return default_pg_timeout  # a backend without options, such as the fake one of the planner


def new_group(ranks: Sequence[int] | None = None, backend: str | None = None) -> dist.ProcessGroup:
    """Create a process group with the default group's timeout; all processes must call it.

    Args:
        ranks: global ranks of the group; None means all.
        backend: communication backend; None means the default group's backend.
    """
    return dist.new_group(ranks, timeout=group_timeout(), backend=backend)  # type: ignore[no-any-return]


def build_device_mesh(device_type: str, shape: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    """Create a device mesh over all processes; its groups have the default group's timeout.

    Args:
        device_type: device type, such as "cuda" or "cpu".
        shape: lengths of the axes, slowest first; their product is the number of processes.
        names: names of the axes.
    """
    ranks = torch.arange(dist.get_world_size(), dtype=torch.int).view(*shape)
    # `init_device_mesh` would create groups with torch's own timeout.
    groups = [_axis_group(ranks, axis) for axis in range(ranks.dim())]
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=tuple(names))


def flatten_mesh(mesh: DeviceMesh, name: str | None = None) -> DeviceMesh:
    """Flatten the axes of a mesh into one; its group has the default group's timeout."""
    flat = mesh._flatten(name)
    # This group is used for collectives only, which use the backend's default timeout.
    _set_pg_timeout(group_timeout(), flat.get_group())
    return flat


def _axis_group(ranks: torch.Tensor, axis: int) -> dist.ProcessGroup:
    """Create the process groups along an axis; return this process's group."""
    rows = ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis])
    # The axis has all processes, and every further group needs its own connections.
    if len(rows) == 1:
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    own = None
    for row in rows.tolist():  # every process creates all groups, in the same order
        group = new_group(row)
        own = group if dist.get_rank() in row else own
    assert own is not None
    return own

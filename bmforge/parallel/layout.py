"""The layout: which mesh axes there are and how long each is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bmforge.errors import ConfigError

__all__ = ["Layout", "build_mesh", "data_parallel_group", "data_parallel_size"]


@dataclass(frozen=True)
class Layout:
    """How a model is divided: world = dp_replicate x dp_shard x cp x tp x pp.

    ``dp_shard`` is what is left of the world; ZeRO shards over it.

    Args:
        zero: 0 replicates parameters, gradients and optimizer state; 2 shards them and keeps the
            parameters gathered from forward to backward; 3 gathers them again in backward.
        tp: tensor-parallel axis.
        pp: pipeline axis.
        cp: context-parallel axis.
        ep: expert-parallel axis, borrowed from dp_shard x cp.
        dp_replicate: number of replicas of the sharded model (HSDP).
    """

    zero: Literal[0, 2, 3] = 3
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dp_replicate: int = 1

    def problems(self, world_size: int) -> list[str]:
        """Return everything that keeps this layout from fitting `world_size` processes."""
        found = []
        if self.zero not in (0, 2, 3):
            found.append(f"zero={self.zero} must be 0, 2 or 3")
        for name in ("tp", "pp", "cp", "ep", "dp_replicate"):
            if getattr(self, name) < 1:
                found.append(f"{name}={getattr(self, name)} must be at least 1")
        wide = [f"{n}={getattr(self, n)}" for n in ("tp", "pp", "cp", "ep") if getattr(self, n) > 1]
        if wide:
            found.append(f"{', '.join(wide)}: this version divides data only; set them to 1")
        fixed = self.dp_replicate * self.tp * self.pp * self.cp
        if not found and world_size % fixed:
            found.append(
                f"dp_replicate={self.dp_replicate} x tp={self.tp} x pp={self.pp} x cp={self.cp} = "
                f"{fixed} does not divide the {world_size} processes; start a multiple of {fixed}"
            )
        if not found and self.zero == 0 and self.dp_replicate > 1:
            found.append("dp_replicate has no effect with zero=0, which replicates everything")
        return found

    def check(self, world_size: int) -> None:
        """Raise `ConfigError` with all problems; the same on every process."""
        problems = self.problems(world_size)
        if problems:
            raise ConfigError(f"{self} on {world_size} processes: " + "; ".join(problems) + ".")

    def axis_lengths(self, world_size: int) -> dict[str, int]:
        """Return the mesh axes in order, slowest first."""
        rest = world_size // (self.dp_replicate * self.tp * self.pp * self.cp)
        if self.zero == 0:
            return {"dp_replicate": rest, "dp_shard": 1}
        return {"dp_replicate": self.dp_replicate, "dp_shard": rest}


def build_mesh(layout: Layout, device: torch.device | str = "cpu") -> DeviceMesh:
    """Build the mesh of a layout over the initialised process group.

    Raises:
        ConfigError: the layout does not fit the number of processes.
    """
    world_size = dist.get_world_size()
    layout.check(world_size)
    lengths = layout.axis_lengths(world_size)
    return init_device_mesh(
        torch.device(device).type, tuple(lengths.values()), mesh_dim_names=tuple(lengths)
    )


def data_parallel_size(mesh: DeviceMesh | None) -> int:
    """Return how many processes work on different rows of a batch."""
    return mesh.size() if mesh is not None else 1


def data_parallel_group(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """Return the group that averages over different rows (None: this process alone)."""
    if mesh is None or mesh.size() == 1:
        return None
    return dist.group.WORLD

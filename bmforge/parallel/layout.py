"""Parallel layout: the axes of the device mesh and their lengths."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from bmforge.errors import ConfigError
from bmforge.parallel.groups import build_device_mesh
from bmforge.records import find_parallel_record

__all__ = [
    "CONTEXT_AXES",
    "LOSS_AXES",
    "ROW_AXES",
    "STAGE_AXES",
    "TENSOR_AXES",
    "TOKEN_AXES",
    "Layout",
    "axis_group",
    "axis_rank",
    "axis_size",
    "build_mesh",
    "counts_here",
    "data_parallel_rank",
    "data_parallel_size",
    "gradient_ranks",
    "mesh_of",
    "random_stream",
    "samples_agree",
    "sum_over_axes",
]

CPMethod = Literal["gather", "ring", "ulysses"]
# Outermost axis first. Adjacent ranks are usually on one machine, so `tp`, which communicates in
# every sublayer, varies fastest, and `pp`, which sends little, slowest.
_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")

# Sets of axes named by the data that differ along them; other modules use these names only.
ROW_AXES = ("dp_replicate", "dp_shard")
CONTEXT_AXES = ("cp",)
TENSOR_AXES = ("tp",)
STAGE_AXES = ("pp",)
TOKEN_AXES = (*ROW_AXES, *CONTEXT_AXES)
# Each process along these axes computes a part of a step's loss, or no loss.
LOSS_AXES = (*TOKEN_AXES, *STAGE_AXES)


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism: world = dp_replicate x dp_shard x cp x tp x pp.

    ``dp_shard`` is derived from the world size and the other degrees; ZeRO shards over dp_shard x
    cp.

    Args:
        zero: ZeRO stage. 0 replicates parameters, gradients and optimizer states; 2 shards them,
            and gathers the parameters once for the forward and the backward pass; 3 gathers them
            for each pass, which needs less memory.
        tp: number of ranks for tensor parallelism; 1 disables it.
        pp: number of ranks for pipeline parallelism; 1 disables it, and so does 0, as in
            CPM-Pretrain.
        cp: number of ranks for context parallelism; 1 disables it.
        ep: number of ranks for expert parallelism, a divisor of dp_shard x cp; 1 disables it.
        dp_replicate: number of replicas of the sharded model (HSDP); 1 shards over all
            data-parallel ranks.
        cp_method: communication of context-parallel attention: "gather" all-gathers keys and
            values, "ring" passes them from rank to rank, and "ulysses" exchanges tokens for heads
            (all-to-all).
        sequence_parallel: shard the activations between tensor-parallel layers along the sequence
            over the `tp` ranks; this saves memory at the same communication volume.
        pp_schedule: pipeline schedule: gpipe, 1f1b, interleaved-1f1b, interleaved-zero-bubble, zbv
            or dualpipev.
        pp_stages_per_rank: number of pipeline stages per rank (if None: the minimum of the
            schedule).
        pp_cut: number of blocks in each pipeline stage, as one number per stage (if empty: balanced
            by `pp_balance`).
        pp_balance: quantity that is balanced over the pipeline stages: "flops" (FLOPs per token) or
            "parameters".
    """

    zero: Literal[0, 2, 3] = 3
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dp_replicate: int = 1
    sequence_parallel: bool = False
    cp_method: CPMethod = "gather"
    pp_schedule: str = "1f1b"
    pp_stages_per_rank: int | None = None
    pp_cut: tuple[int, ...] = ()
    pp_balance: Literal["flops", "parameters"] = "flops"

    def __post_init__(self) -> None:
        """Replace pp=0 (no pipeline) with pp=1."""
        if self.pp == 0:
            object.__setattr__(self, "pp", 1)

    def __str__(self) -> str:
        """Format `zero` and the fields that differ from their defaults."""
        return f"Layout({', '.join(f'{n}={v!r}' for n, v in self.unusual().items())})"

    def unusual(self) -> dict[str, Any]:
        """Return `zero` and the other fields that differ from their defaults."""
        usual = Layout()
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {n: v for n, v in values.items() if n == "zero" or v != getattr(usual, n)}

    @property
    def is_tensor_parallel(self) -> bool:
        """True if tensor parallelism is used (tp > 1)."""
        return self.tp > 1

    @property
    def is_context_parallel(self) -> bool:
        """True if the tokens of each sequence are sharded (cp > 1)."""
        return self.cp > 1

    @property
    def splits_stages_or_tokens(self) -> str:
        """The first option that splits stages or tokens, such as "layout.pp=2", or ""."""
        axes = {"layout.pp": self.pp, "layout.cp": self.cp}
        return next((f"{name}={size}" for name, size in axes.items() if size > 1), "")

    def row_groups(self, world_size: int) -> int:
        """Return the number of process groups that process different samples of a batch."""
        return world_size // (self.tp * self.pp * self.cp)

    def problems(self, world_size: int) -> list[str]:
        """Return the reasons why this layout cannot run on `world_size` processes."""
        problems = []
        if self.zero not in (0, 2, 3):
            problems.append(f"zero={self.zero} must be 0, 2 or 3")
        for name in ("tp", "pp", "cp", "ep", "dp_replicate"):
            if getattr(self, name) < 1:
                problems.append(f"{name}={getattr(self, name)} must be at least 1")
        problems += self._pipeline_problems()
        if self.sequence_parallel and self.tp == 1:
            problems.append("sequence_parallel has no effect with tp=1")
        if self.cp_method not in get_args(CPMethod):
            problems.append(f"cp_method={self.cp_method!r} must be one of {get_args(CPMethod)}")
        elif self.cp_method != "gather" and self.cp == 1:
            problems.append(f"cp_method={self.cp_method!r} has no effect with cp=1")
        fixed = self.dp_replicate * self.tp * self.pp * self.cp
        if not problems and world_size % fixed:
            problems.append(
                f"dp_replicate={self.dp_replicate} x tp={self.tp} x pp={self.pp} x cp={self.cp} = "
                f"{fixed} does not divide the {world_size} processes; start a multiple of {fixed}"
            )
        if not problems and self.ep > 1 and self.zero == 0:
            problems.append(
                f"ep={self.ep} needs zero=2 or 3, because zero=0 replicates all parameters"
            )
        elif not problems and world_size // fixed * self.cp % self.ep:
            problems.append(
                f"ep={self.ep} does not divide dp_shard={world_size // fixed} x "
                f"cp={self.cp}, the number of processes among which experts can be sharded"
            )
        if not problems and self.zero == 0 and self.dp_replicate > 1:
            problems.append(
                "dp_replicate has no effect with zero=0, which replicates all parameters"
            )
        return problems

    def _pipeline_problems(self) -> list[str]:
        unset = Layout()
        names = ("pp_schedule", "pp_stages_per_rank", "pp_cut", "pp_balance")
        if self.pp == 1:
            return [
                f"{name}={getattr(self, name)!r} has no effect with pp=1"
                for name in names
                if getattr(self, name) != getattr(unset, name)
            ]
        if self.pp_balance not in ("flops", "parameters"):
            return [f"pp_balance={self.pp_balance!r} must be 'flops' or 'parameters'"]
        return []

    def check(self, world_size: int) -> None:
        """Raise a `ConfigError` that lists all problems, the same on every process."""
        problems = self.problems(world_size)
        if problems:
            raise ConfigError(
                f"{self} cannot be used with {world_size} processes: {'; '.join(problems)}."
            )

    def axis_lengths(self, world_size: int) -> dict[str, int]:
        """Return the lengths of the mesh axes, outermost axis first."""
        rows_left = world_size // (self.dp_replicate * self.tp * self.pp * self.cp)
        # Without ZeRO all data-parallel processes are replicas, so the axis of the shards has
        # length 1.
        rows = (rows_left, 1) if self.zero == 0 else (self.dp_replicate, rows_left)
        return dict(zip(_AXES, (self.pp, *rows, self.cp, self.tp), strict=True))


def build_mesh(layout: Layout, device: torch.device | str = "cpu") -> DeviceMesh:
    """Build the device mesh of a layout; the process group must be initialized.

    Raises:
        ConfigError: the layout does not fit the number of processes.
    """
    world_size = dist.get_world_size()
    layout.check(world_size)
    lengths = layout.axis_lengths(world_size)
    return build_device_mesh(torch.device(device).type, tuple(lengths.values()), tuple(lengths))


def axis_size(mesh: DeviceMesh | None, *axes: str) -> int:
    """Return the product of the lengths of the named mesh axes (1 without a mesh)."""
    return 1 if mesh is None else math.prod(mesh[axis].size() for axis in axes)


def axis_rank(mesh: DeviceMesh | None, axis: str) -> int:
    """Return this process's rank on a mesh axis."""
    return 0 if mesh is None else mesh.get_local_rank(axis)


def axis_group(mesh: DeviceMesh, axis: str) -> dist.ProcessGroup:
    """Return this process's process group along one mesh axis."""
    return mesh.get_group(axis)


def data_parallel_size(mesh: DeviceMesh | None) -> int:
    """Return the number of groups of processes that process different samples of a batch."""
    return axis_size(mesh, *ROW_AXES)


def data_parallel_rank(mesh: DeviceMesh | None) -> int:
    """Return the data-parallel rank of this process, which selects its samples of a batch."""
    return axis_rank(mesh, "dp_replicate") * axis_size(mesh, "dp_shard") + axis_rank(
        mesh, "dp_shard"
    )


def gradient_ranks(mesh: DeviceMesh | None) -> int:
    """Return the number of processes over which each gradient is averaged."""
    return axis_size(mesh, *TOKEN_AXES)


def random_stream(mesh: DeviceMesh | None, rank: int) -> int:
    """Return the index of this process's random stream; tensor-parallel ranks share one stream."""
    (axis,) = TENSOR_AXES
    return (rank - axis_rank(mesh, axis)) // axis_size(mesh, axis)


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """Return the mesh that `parallelize` used for a model; None for a single-process model.

    Raises:
        ConfigError: there are several processes, but the model is not parallelized.
    """
    record = find_parallel_record(model)
    mesh = None if record is None else record.mesh
    if mesh is None and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            f"a {type(model).__name__} is trained by {dist.get_world_size()} processes, but the "
            "model is not parallelized. Call parallelize(model, layout) first."
        )
    return mesh


def counts_here(mesh: DeviceMesh | None, *axes: str) -> bool:
    """Return True if this process has rank 0 on all mesh axes other than `axes`.

    Values that are replicated along the other axes are counted only on such processes.
    """
    return all(axis_rank(mesh, axis) == 0 for axis in _AXES if axis not in axes)


def samples_agree(mesh: DeviceMesh | None, digest: int) -> bool:
    """Return True, on all processes, if processes that must read the same samples did so.

    Args:
        mesh: mesh with all axes.
        digest: 63-bit digest of this process's samples.

    Comm: one all-reduce of an integer per process.
    """
    if mesh is None or mesh.size() == axis_size(mesh, *ROW_AXES):
        return True
    # Each process fills its own place, so the sum is an all-gather.
    digests = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=mesh.device_type)
    digests[dist.get_rank()] = digest
    dist.all_reduce(digests)
    table = digests[mesh.mesh.to(digests.device)]
    for dim, axis in enumerate(mesh.mesh_dim_names or ()):
        if axis not in ROW_AXES and not torch.equal(
            table, table.narrow(dim, 0, 1).expand_as(table)
        ):
            return False
    return True


def sum_over_axes(values: Tensor, mesh: DeviceMesh | None, *axes: str) -> Tensor:
    """Sum values over the processes along `axes`; return the same sum on every process.

    Values must be equal along the other axes, and each is added once.

    Comm: one all-reduce over all processes.
    """
    if mesh is None or mesh.size() == 1:
        return values
    # Zeros where the value is a replica, because the all-reduce runs over all processes.
    total = values.clone() if counts_here(mesh, *axes) else torch.zeros_like(values)
    dist.all_reduce(total)
    return total

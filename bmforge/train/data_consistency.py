"""Checks that processes read consistent samples and equal numbers of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from bmforge.batch import Batch
from bmforge.errors import ConfigError
from bmforge.parallel import ROW_AXES, counts_here, data_parallel_size, samples_agree

__all__ = ["check_same_count", "check_same_rows", "sum_counts"]


def check_same_count(count: int, total: int, squares: int, position: str) -> None:
    """Raise an error on all processes if their numbers of micro-batches differ.

    Each forward and backward pass runs collectives, in which the other processes would wait forever
    for a process with fewer micro-batches.

    Args:
        count: this process's number of micro-batches of the step.
        total: sum of the counts over all processes.
        squares: sum of the squared counts, which is minimal if all counts are equal.
        position: name of the step, for the error message.

    Raises:
        ConfigError: the counts differ.

    Comm: none if the counts are equal.
    """
    size = dist.get_world_size() if dist.is_initialized() else 1
    if squares * size == total * total:
        return
    counts = [0] * size
    dist.all_gather_object(counts, count)
    raise ConfigError(
        f"the processes have different numbers of micro-batches in {position}: {counts} (in the "
        "order of the ranks). Pass the same number on every process, for example with padding "
        "sequences whose labels are all -100."
    )


def sum_counts(
    counts: Sequence[int],
    stop: bool,
    passes: int,
    position: str,
    mesh_and_device: tuple[DeviceMesh | None, torch.device],
) -> list[int]:
    """Sum counts over processes with different samples, and stop requests over all processes.

    Args:
        counts: counts for the samples of this process, such as the number of labels.
        stop: True if this process wants to stop.
        passes: this process's number of micro-batches, which must be equal everywhere.
        position: name of the step, for error messages.
        mesh_and_device: mesh with all axes, and device on which the all-reduce runs.

    Returns:
        the summed counts, and the number of processes that want to stop

    Comm: one all-reduce of a few integers.
    """
    mesh, device = mesh_and_device
    own_counts = counts if counts_here(mesh, *ROW_AXES) else [0] * len(counts)
    own = [*own_counts, int(stop), passes, passes * passes]
    values = torch.tensor(own, dtype=torch.int64, device=device)
    if mesh is not None and mesh.size() > 1:
        dist.all_reduce(values)
    *sums, total, squares = values.tolist()
    check_same_count(passes, total, squares, position)
    return sums


def check_same_rows(micro_batches: Sequence[Batch], mesh: DeviceMesh | None) -> None:
    """Raise an error on all processes if a model-parallel group has read different samples.

    Tensor-, context- and pipeline-parallel processes work on the same samples. If a loader used the
    global rank, they would read different samples, and losses would look plausible but be wrong.

    Args:
        micro_batches: micro-batches of this process's first step.
        mesh: mesh with all axes.

    Raises:
        ConfigError: the samples differ.

    Comm: one all-reduce of an integer per process, with any of these kinds of parallelism.
    """
    if mesh is None or data_parallel_size(mesh) == mesh.size():
        return
    digest = blake2b(digest_size=8)
    for batch in micro_batches:
        for name, value in sorted(batch.items()):
            digest.update(name.encode())
            if isinstance(value, Tensor):
                flat = torch.empty(value.numel(), dtype=value.dtype)
                flat.copy_(value.detach().reshape(-1))
                digest.update(flat.view(torch.uint8).numpy())
    if not samples_agree(mesh, int.from_bytes(digest.digest(), "little") >> 1):
        raise ConfigError(
            "the processes of a tensor, context or pipeline parallel group must read the same "
            "samples, but they read different ones. Create the loader with "
            "rank=data_parallel_rank(mesh) and world=data_parallel_size(mesh) of "
            "bmforge.parallel instead of the process rank."
        )

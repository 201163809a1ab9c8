"""Whether processes were given what fits: the same rows where they share them, as many passes."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from bmforge.batch import Batch
from bmforge.errors import ConfigError
from bmforge.parallel import data_parallel_size, rows_agree

__all__ = ["check_same_count", "check_same_rows"]


def check_same_count(count: int, total: int, squares: int, place: str) -> None:
    """Raise, on all processes, where they have unequal numbers of micro-batches.

    Each forward and backward is a set of collectives, so who has fewer would be waited for.

    Args:
        count: this process's micro-batches of the step.
        total: their sum over all processes, and
        squares: that of their squares, which is the least it can be where all are equal.
        place: the step, by name.

    Raises:
        ConfigError: they are unequal.

    Comm: none where they are equal.
    """
    size = dist.get_world_size() if dist.is_initialized() else 1
    if squares * size == total * total:
        return
    counts = [0] * size
    dist.all_gather_object(counts, count)
    raise ConfigError(
        f"{place}: the loaders gave rank after rank {counts} micro-batches. Every process needs "
        "equally many: fill up with rows whose labels are all -100, which count nothing."
    )


def check_same_rows(micro_batches: Sequence[Batch], mesh: DeviceMesh | None) -> None:
    """Raise, on all processes, where those that share rows hold different ones.

    Along tensor, context and pipeline parallelism processes work on the same rows together. A
    loader that is given the process's own rank deals each of them other rows; losses then look
    sound and are not.

    Args:
        micro_batches: of this process's first step.
        mesh: of all axes.

    Raises:
        ConfigError: they differ.

    Comm: one all-reduce of an integer per process, where processes share rows.
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
    if not rows_agree(mesh, int.from_bytes(digest.digest(), "little") >> 1):
        raise ConfigError(
            "processes that share rows (tensor, context and pipeline parallelism) were given "
            "different ones. Give the loader rank=data_parallel_rank(mesh) and "
            "world=data_parallel_size(mesh) of bmforge.parallel, not the process's own rank."
        )

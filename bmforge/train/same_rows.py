"""Whether processes that work on the same rows were given the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from bmforge.batch import Batch
from bmforge.errors import ConfigError
from bmforge.parallel import data_parallel_size, rows_agree

__all__ = ["check_same_rows"]


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

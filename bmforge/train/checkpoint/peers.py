"""Collectives for checkpointing, on a separate process group."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from bmforge.parallel import new_group

__all__ = ["Peers"]


class Peers:
    """Processes that save and load together; all calls do nothing with a single process.

    Creating and closing are collective. The group is separate from that of training, so that a
    background thread may communicate during training; only one thread may use it at a time.
    """

    def __init__(self) -> None:
        joined = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if joined else 0
        self.world_size: int = dist.get_world_size() if joined else 1
        # gloo works on host memory: collectives of a background save are not queued on the device
        # between those of the training step.
        self._group: Any = new_group(backend="gloo") if self.world_size > 1 else None

    def gather(self, value: Any) -> list[Any]:
        """Return every process's `value`, ordered by rank, on every process."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's `value` on every process."""
        if self._group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def close(self) -> None:
        """Destroy the process group, unless the default group has already been destroyed."""
        # A save that runs in a thread may finish after the run has left `torch.distributed`.
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

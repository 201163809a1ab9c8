"""Streams and events in BMTrain's `config`, for programs that wait on them.

torch's sharding waits for its own copies and reductions before it hands results to the current
stream, so the streams of BMTrain are the current stream here. On a CPU, they are torch's
placeholders, which do nothing.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["STREAM_KEYS", "HostStream", "current_stream", "new_event"]

STREAM_KEYS = frozenset(
    ("load_stream", "calc_stream", "barrier_stream", "tp_comm_stream", "pp_comm_stream")
)


class HostStream(torch.cpu.Stream):
    """CPU replacement of a device stream: work on a CPU is done when its call returns."""

    def record_event(self, event: Any = None) -> Any:
        """Return the given event, or a new one."""
        return event or torch.cpu.Event()

    def synchronize(self) -> None:
        """Return immediately, since the work is already done."""

    def query(self) -> bool:
        """Return True, since the work is already done."""
        return True


def current_stream(device: torch.device | None) -> Any:
    """Return the device's current stream, or a `HostStream` on a CPU."""
    if device is None or device.type == "cpu":
        return HostStream()
    return torch.accelerator.current_stream(device)


def new_event(device: torch.device | None) -> Any:
    """Return a new event of the device."""
    if device is None or device.type == "cpu":
        return torch.cpu.Event()
    return torch.Event(device)

"""Streams and events that BMTrain's `config` holds, for programs that wait on them.

torch's sharding waits for its own copies and reductions before it hands results to the current
stream, so the streams of BMTrain are the current stream here. A CPU has none; `HostStream` and
`HostEvent` have the same methods, and nothing to wait for.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["STREAM_KEYS", "HostEvent", "HostStream", "current_stream", "new_event"]

STREAM_KEYS = frozenset(
    ("load_stream", "calc_stream", "barrier_stream", "tp_comm_stream", "pp_comm_stream")
)


class HostEvent:
    """An event of a CPU, where everything recorded before it has already run."""

    def record(self, stream: Any = None) -> None:
        """Do nothing: work on a CPU is done when its call returns."""

    def wait(self, stream: Any = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True: the work is done."""
        return True


class HostStream:
    """The one order of execution that a CPU has."""

    def wait_stream(self, stream: Any) -> None:
        """Return at once: work on a CPU is done when its call returns."""

    def wait_event(self, event: Any) -> None:
        """Return at once."""

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        """Return the event, or a new one."""
        return event or HostEvent()

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True: the work is done."""
        return True


def current_stream(device: torch.device | None) -> Any:
    """Return the device's current stream, or a `HostStream` where it has none."""
    if device is None or device.type == "cpu":
        return HostStream()
    return torch.accelerator.current_stream(device)


def new_event(device: torch.device | None) -> Any:
    """Return an event of the device, or a `HostEvent` where it has none."""
    if device is None or device.type == "cpu":
        return HostEvent()
    return torch.Event(device)

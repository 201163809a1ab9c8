"""What of an optimizer's state leaves the device: settings, the choice, whether there is room.

What is chosen leaves from the end of the model: its gradients come first in backward and its
weights are needed last in the next forward, so their way to the host and back has the most to hide
behind.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from bmforge.device import is_host
from bmforge.errors import ConfigError
from bmforge.host_memory import available_host_bytes
from bmforge.memory.homes import StateDtype
from bmforge.memory.spill import format_bytes

__all__ = ["OffloadConfig", "check_room", "choose_parameters"]


@dataclass(frozen=True)
class OffloadConfig:
    """What of the optimizer lives outside the device.

    Args:
        fraction: of the parameters, counted from the model's end, whose optimizer state (and fp32
            master weights, where the device computes with bf16 ones) leaves; whole parameters, at
            least so many. "auto": as many as the device has no room for, found at the first step.
        target: host memory, or a file on disk.
        states: how moments are kept there; they compute in fp32.
        directory: of the file; None takes the system's temporary directory.
        weights: blocks' weights live there as well and stream in; for one process, with fraction 1.
        activations: what blocks keep for backward goes to the host, but for the last block's.
        gradients: "leave": they go to the host as they are produced; "stay": they wait for the step
            where they are; "auto": leave, unless the device is the host.
    """

    fraction: float | Literal["auto"] = 0.0
    target: Literal["host", "disk"] = "host"
    states: StateDtype = "fp32"
    directory: Path | None = None
    weights: bool = False
    activations: bool = False
    gradients: Literal["auto", "leave", "stay"] = "auto"

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a value out of range or one without effect."""
        if self.fraction != "auto" and not 0.0 <= self.fraction <= 1.0:
            raise ConfigError(
                f"offload.fraction={self.fraction} must lie between 0 (nothing leaves the device) "
                'and 1 (everything does), or be "auto".'
            )
        if self.directory is not None and self.target != "disk":
            raise ConfigError(
                f"offload.directory={str(self.directory)!r} has no effect with offload.target="
                f"{self.target!r}. Set offload.target=disk or leave it out."
            )
        if self.weights and self.fraction != 1.0:
            raise ConfigError(
                f"offload.weights streams the weights that the optimizer steps outside the device: "
                f"it needs offload.fraction=1, not {self.fraction}."
            )
        for field in ("target", "states", "gradients"):
            value = getattr(self, field)
            if not self.is_on and value != type(self).__dataclass_fields__[field].default:
                raise ConfigError(
                    f"offload.{field}={value!r} has no effect: offload.fraction is 0. Set a "
                    "fraction up to 1, or auto."
                )

    @property
    def is_on(self) -> bool:
        """Whether anything may leave."""
        return self.fraction != 0.0

    def leaves(self, device: torch.device) -> bool:
        """Whether gradients leave `device` as they are produced."""
        return self.gradients == "leave" or (self.gradients == "auto" and not is_host(device))


def choose_parameters(parameters: Sequence[nn.Parameter], fraction: float) -> set[int]:
    """Return the ids of the last parameters that make up at least `fraction` of all elements.

    Whole tensors are counted, not shards, so all processes choose alike.
    """
    needed = fraction * sum(parameter.numel() for parameter in parameters)
    chosen: set[int] = set()
    for parameter in reversed(parameters):
        if needed <= 0:
            break
        chosen.add(id(parameter))
        needed -= parameter.numel()
    return chosen


def check_room(needed_bytes: int) -> None:
    """Raise unless the host has memory for what all processes on it will keep there.

    Args:
        needed_bytes: by this process.

    Raises:
        ConfigError: it has less.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    available = available_host_bytes()
    if available is not None and needed_bytes * local > available:
        raise ConfigError(
            f"offloading needs {format_bytes(needed_bytes * local)} of host memory "
            f"({format_bytes(needed_bytes)} for each of {local} processes) and "
            f"{format_bytes(available)} are available. Use offload.target=disk, offload.states="
            "8bit, or a smaller offload.fraction."
        )

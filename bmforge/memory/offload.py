"""Optimizer state offload: options, selection of parameters, and memory checks.

Parameters are selected from the end of the model: backward produces their gradients first and the
next forward needs their weights last, which leaves the most time to hide the copies.
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
from bmforge.memory.spill import format_bytes
from bmforge.memory.state_storage import StateDtype

__all__ = ["OffloadConfig", "check_room", "choose_parameters"]


@dataclass(frozen=True)
class OffloadConfig:
    """Offload of optimizer states, weights, activations and gradients.

    Args:
        fraction: minimum share of the parameters, from the model's end, whose optimizer state (and
            fp32 master weights if the model is bf16) is offloaded; "auto" offloads what does not
            fit on the device, determined at the first step.
        target: host memory, or a file on disk.
        states: storage format of the moments; updates are computed in fp32.
        directory: directory of the file; None uses the system's temporary directory.
        weights: offload and stream the blocks' weights too; for one process, with fraction 1.
        activations: offload tensors saved for backward, except the last block's.
        gradients: "leave" copies gradients to the host as they are produced; "stay" keeps them on
            the device until the step; "auto" is "leave", except on a CPU.
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
                f"offload.weights needs offload.fraction=1, not {self.fraction}: streamed weights "
                "are updated by an optimizer on the host."
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
        """Whether any offload is enabled."""
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
    """Check that the host has enough memory for the offloaded states of all its processes.

    Args:
        needed_bytes: bytes of this process.

    Raises:
        ConfigError: the host has less free memory.
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

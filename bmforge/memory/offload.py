"""Optimizer state offload: options, selection of parameters, and a check of host memory.

Parameters are selected from the end of the model. Backward computes their gradients first and the
next forward needs their weights last, which leaves the most time for copying.
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

__all__ = ["OffloadConfig", "check_host_memory", "choose_parameters"]


@dataclass(frozen=True)
class OffloadConfig:
    """Offload of optimizer states, weights, activations and gradients.

    Args:
        fraction: minimum fraction of the parameters, from 0 to 1, whose optimizer states are
            offloaded, with the fp32 master weights of a bf16 model. The last layers are offloaded
            first. "auto" measures the memory in the first step and offloads just enough to fit on
            the device.
        target: storage of the offloaded states: "host" (host memory) or "disk" (a file).
        states: storage format of Adam's offloaded moments; updates are always computed in fp32.
        directory: directory of the file with the offloaded states, for target "disk" (if None: the
            system's temporary directory).
        weights: also offload the weights of the blocks and stream them to the device; requires a
            single process and fraction 1.
        activations: also offload the activations that are saved for the backward pass, except those
            of the last block.
        gradients: time at which gradients are copied to the host: "leave" (as soon as they are
            computed), "stay" (in the optimizer step) or "auto" ("leave" on an accelerator, "stay"
            on a CPU).
    """

    fraction: float | Literal["auto"] = 0.0
    target: Literal["host", "disk"] = "host"
    states: StateDtype = "fp32"
    directory: Path | None = None
    weights: bool = False
    activations: bool = False
    gradients: Literal["auto", "leave", "stay"] = "auto"

    def __post_init__(self) -> None:
        """Raise `ConfigError` if a value is out of range or has no effect."""
        if self.fraction != "auto" and not 0.0 <= self.fraction <= 1.0:
            raise ConfigError(
                f"offload.fraction={self.fraction} must be between 0 (offload nothing) and 1 "
                '(offload everything), or "auto".'
            )
        if self.directory is not None and self.target != "disk":
            raise ConfigError(
                f"offload.directory={str(self.directory)!r} has no effect with offload.target="
                f"{self.target!r}. Set offload.target=disk, or leave out "
                "offload.directory."
            )
        if self.weights and self.fraction != 1.0:
            raise ConfigError(
                f"offload.weights=True needs offload.fraction=1, not {self.fraction}, because "
                "streamed weights are updated by an optimizer on the host. Set offload.fraction=1."
            )
        for field in ("target", "states", "gradients"):
            value = getattr(self, field)
            if not self.is_on and value != type(self).__dataclass_fields__[field].default:
                raise ConfigError(
                    f"offload.{field}={value!r} has no effect with offload.fraction=0. Set a "
                    "fraction above 0, or auto."
                )

    @property
    def is_on(self) -> bool:
        """True if any offload is enabled."""
        return self.fraction != 0.0

    def leaves(self, device: torch.device) -> bool:
        """Return True if gradients are copied from `device` to the host during backward."""
        # On a CPU a copy to the host frees no memory, so "auto" leaves the gradients in place
        # there.
        return self.gradients == "leave" or (self.gradients == "auto" and not is_host(device))


def choose_parameters(parameters: Sequence[nn.Parameter], fraction: float) -> set[int]:
    """Return the `id`s of the fewest last parameters with at least `fraction` of all elements.

    Sizes are those of whole tensors, not of shards, so that all processes choose the same
    parameters.
    """
    needed = fraction * sum(parameter.numel() for parameter in parameters)
    chosen: set[int] = set()
    for parameter in reversed(parameters):
        if needed <= 0:
            break
        chosen.add(id(parameter))
        needed -= parameter.numel()
    return chosen


def check_host_memory(needed_bytes: int) -> None:
    """Check that the host has enough memory for the offloaded states of all its processes.

    Args:
        needed_bytes: bytes that this process needs.

    Raises:
        ConfigError: the host has less free memory than its processes need.
    """
    # torchrun's number of processes on this host, which share its memory.
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    available = available_host_bytes()
    if available is not None and needed_bytes * local > available:
        raise ConfigError(
            f"offloading needs {format_bytes(needed_bytes * local)} of host memory "
            f"({format_bytes(needed_bytes)} for each of {local} processes), but "
            f"{format_bytes(available)} are available. Use offload.target=disk, "
            "offload.states=8bit, or a smaller offload.fraction."
        )

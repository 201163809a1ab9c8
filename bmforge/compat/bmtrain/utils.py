"""Printing functions and small helpers of BMTrain."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bmforge.compat.bmtrain.runtime import config
from bmforge.device import device_memory_bytes
from bmforge.host_memory import resident_bytes

__all__ = [
    "AverageRecorder", "check_torch_version", "print_block", "print_dict", "print_rank", "round_up",
    "see_memory", "tp_split_tensor",
]  # fmt: skip

_WIDTH = 60
_GIB = 1 << 30


def print_rank(*args: Any, rank: int = 0, **kwargs: Any) -> None:
    """Call `print` on one rank only (default: 0)."""
    if config["rank"] == rank:
        print(*args, **kwargs)


def print_block(title: str, content: str | None = None, file: Any = None) -> None:
    """Print a titled block of text."""
    out = sys.stdout if file is None else file
    print(f" {title} ".center(_WIDTH, "="), file=out)
    if content is not None:
        for line in content.splitlines():
            print(f"= {line}".ljust(_WIDTH - 1) + "=", file=out)
        print("=" * _WIDTH, file=out)


def print_dict(title: str, content: Mapping[str, Any], file: Any = None) -> None:
    """Print the names and values of a dict as a titled block."""
    width = max((len(str(name)) for name in content), default=0)
    lines = [f"{str(name).ljust(width)} : {value}" for name, value in content.items()]
    print_block(title, "\n".join(lines), file)


def see_memory(message: str, detail: bool = False) -> None:
    """Print peak device memory and host memory in GiB on rank 0.

    Args:
        message: text before the numbers.
        detail: also print torch's memory summary of the accelerator.
    """
    if config["rank"] != 0:
        return
    peak = device_memory_bytes(config.device)
    shown = "" if peak is None else f"device peak {peak / _GIB:.2f} GiB, "
    print(f"{message}: {shown}host {resident_bytes() / _GIB:.2f} GiB")
    if peak is not None:
        module = torch.get_device_module(config.device)
        if detail:
            print(module.memory_summary(config.device))
        module.reset_peak_memory_stats(config.device)


def check_torch_version(version_str: str) -> int:
    """Return the torch version minus `version_str`; x.y.z counts as x * 10000 + y * 100 + z."""

    def number(version: str) -> int:
        major, minor, patch = (int(part) for part in re.findall(r"\d+", version)[:3])
        return major * 10000 + minor * 100 + patch

    return number(torch.__version__) - number(version_str)


def round_up(x: int, d: int) -> int:
    """Return the smallest multiple of `d` that is at least `x`."""
    return -(-x // d) * d


def tp_split_tensor(tensor: Tensor, split_dim: int) -> Tensor:
    """Return this tensor-parallel process's part of a tensor."""
    return tensor.chunk(config["tp_size"], split_dim)[config["tp_rank"]].contiguous()


class AverageRecorder:
    """Exponential moving average with bias correction.

    Args:
        alpha: weight of the previous average, 0 to 1.
        start_value: value before the first record.
    """

    def __init__(self, alpha: float = 0.9, start_value: float = 0.0) -> None:
        self.alpha, self._value, self._steps = alpha, start_value, 0

    @property
    def value(self) -> float:
        """Current average."""
        return self._value / (1.0 - self.alpha**self._steps) if self._steps else self._value

    def record(self, v: float) -> None:
        """Add a value to the moving average."""
        past = self._value if self._steps else 0.0
        self._value = self.alpha * past + (1.0 - self.alpha) * v
        self._steps += 1

"""What programs print, and the small helpers that stand beside it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bmforge.compat.bmtrain.runtime import config
from bmforge.device import device_memory_bytes
from bmforge.host_memory import resident_bytes
from bmforge.parallel.collectives import all_gather

__all__ = [
    "AverageRecorder",
    "gather_result",
    "print_block",
    "print_dict",
    "print_rank",
    "round_up",
    "see_memory",
    "sum_loss",
    "tp_split_tensor",
    "wait_loader",
]

_WIDTH = 60
_GIB = 1 << 30


def print_rank(*args: Any, rank: int = 0, **kwargs: Any) -> None:
    """Print on one process."""
    if config["rank"] == rank:
        print(*args, **kwargs)


def print_block(title: str, content: str | None = None, file: Any = None) -> None:
    """Print text in a box."""
    out = sys.stdout if file is None else file
    print(f" {title} ".center(_WIDTH, "="), file=out)
    if content is not None:
        for line in content.splitlines():
            print(f"= {line}".ljust(_WIDTH - 1) + "=", file=out)
        print("=" * _WIDTH, file=out)


def print_dict(title: str, content: Mapping[str, Any], file: Any = None) -> None:
    """Print names and values in a box."""
    width = max((len(str(name)) for name in content), default=0)
    lines = [f"{str(name).ljust(width)} : {value}" for name, value in content.items()]
    print_block(title, "\n".join(lines), file)


def see_memory(message: str, detail: bool = False) -> None:
    """Print memory in GiB on rank 0: of the accelerator, at its highest, and of the process.

    Args:
        message: what stands before it.
        detail: also print torch's own table, where there is an accelerator.
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


def sum_loss(loss: Tensor, comm: Any = None) -> Tensor:
    """Return the mean over the processes, whatever the name says."""
    group = config["comm"] if comm is None else comm
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    return total / group.size()


def gather_result(result: Tensor) -> Tensor:
    """Return the rows of all processes, in their order, on the same device.

    Processes may have different numbers of rows, as of the last batch of an evaluation.

    Shape:
        result: (R, ...), or a scalar, which is a row -> (sum of R, ...)
    """
    rows = result.detach().reshape(1) if result.dim() == 0 else result.detach()
    rows, group = rows.to(config.device), config["comm"]
    counts = all_gather(torch.tensor([len(rows)], device=config.device), group, 0).tolist()
    padded = rows.new_zeros((max(counts), *rows.shape[1:]))
    padded[: len(rows)] = rows
    parts = all_gather(padded, group, 0).split(max(counts))
    kept = [part[:count] for part, count in zip(parts, counts, strict=True)]
    return torch.cat(kept).to(result.device)


def wait_loader() -> None:
    """Do nothing: torch waits for what a block has gathered."""
    config.need("wait_loader()")


def round_up(x: int, d: int) -> int:
    """Return the smallest multiple of `d` that is not below `x`."""
    return -(-x // d) * d


def tp_split_tensor(tensor: Tensor, split_dim: int) -> Tensor:
    """Return this tensor-parallel process's part."""
    return tensor.chunk(config["tp_size"], split_dim)[config["tp_rank"]].contiguous()


class AverageRecorder:
    """A moving average without the bias of its beginning.

    Args:
        alpha: weight of the past.
        start_value: value before the first record.
    """

    def __init__(self, alpha: float = 0.9, start_value: float = 0.0) -> None:
        self.alpha, self._value, self._steps = alpha, start_value, 0

    @property
    def value(self) -> float:
        """The average so far."""
        return self._value / (1.0 - self.alpha**self._steps) if self._steps else self._value

    def record(self, v: float) -> None:
        """Take one value in."""
        past = self._value if self._steps else 0.0
        self._value = self.alpha * past + (1.0 - self.alpha) * v
        self._steps += 1

"""Barriers and collectives for losses and results."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bmforge.compat.bmtrain.runtime import config, synchronize
from bmforge.parallel.collectives import all_gather

__all__ = ["gather_result", "sum_loss", "synchronize", "wait_loader"]


def sum_loss(loss: Tensor, comm: Any = None) -> Tensor:
    """Return the mean loss over the processes; despite the name, BMTrain computes the mean."""
    group = config["comm"] if comm is None else comm
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    return total / group.size()


def gather_result(result: Tensor) -> Tensor:
    """Gather the results of all processes along dim 0, in rank order, on the same device.

    Processes may have different numbers of rows, as in the last batch of an evaluation.

    Shape:
        result: (R, ...), or a scalar, which counts as one row -> (sum of R, ...)
    """
    rows = result.detach().reshape(1) if result.dim() == 0 else result.detach()
    rows, group = rows.to(config.device), config["comm"]
    counts = all_gather(torch.tensor([len(rows)], device=config.device), group, 0).tolist()
    padded = rows.new_zeros((max(counts), *rows.shape[1:]))
    padded[: len(rows)] = rows
    parts = all_gather(padded, group, 0).split(max(counts))
    trimmed = [part[:count] for part, count in zip(parts, counts, strict=True)]
    return torch.cat(trimmed).to(result.device)


def wait_loader() -> None:
    """Do nothing, since torch itself waits for gathered parameters."""
    config.need("wait_loader()")

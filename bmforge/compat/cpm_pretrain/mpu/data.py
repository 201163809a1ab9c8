"""Broadcasts a batch within the tensor-parallel group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bmforge.compat.cpm_pretrain.mpu.initialize import (
    get_model_parallel_group,
    get_model_parallel_rank,
    get_model_parallel_src_rank,
    groups,
)
from bmforge.errors import DataError

__all__ = ["broadcast_data"]


def broadcast_data(
    keys: Sequence[str], data: Mapping[str, Tensor] | None, datatype: torch.dtype
) -> dict[str, Tensor]:
    """Broadcast tensors from the first process of the tensor-parallel group to this device.

    Args:
        keys: names of the tensors.
        data: dict from name to tensor; only that of the first process is read.
        datatype: dtype of all tensors.

    Raises:
        DataError: a tensor is missing or has another dtype; raised on all processes.

    Comm: two broadcasts within the group, of the shapes and of all values.
    """
    group, source = get_model_parallel_group(), get_model_parallel_src_rank()
    is_first = get_model_parallel_rank() == 0
    sent: list[Any] = [_describe(keys, data or {}, datatype) if is_first else None]
    dist.broadcast_object_list(sent, src=source, group=group)
    shapes, problem = sent[0]
    if problem:
        raise DataError(problem)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = torch.empty(sum(sizes), dtype=datatype, device=groups.device)
    if is_first and data is not None:
        torch.cat([data[key].reshape(-1).to(groups.device) for key in keys], out=flat)
    dist.broadcast(flat, src=source, group=group)
    parts = flat.split(sizes)
    return {k: part.view(shape) for k, part, shape in zip(keys, parts, shapes, strict=True)}


def _describe(
    keys: Sequence[str], data: Mapping[str, Tensor], datatype: torch.dtype
) -> tuple[list[tuple[int, ...]], str]:
    """Return the shapes of the tensors, and an error message if a tensor is not valid."""
    missing = [key for key in keys if key not in data]
    if missing:
        return [], f"broadcast_data: the batch lacks {', '.join(missing)} (it has {list(data)})."
    others = [f"{key} is {data[key].dtype}" for key in keys if data[key].dtype != datatype]
    if others:
        return [], (
            f"broadcast_data sends {datatype}, but {', '.join(others)}. Convert the tensors to "
            f"{datatype} first."
        )
    return [tuple(data[key].shape) for key in keys], ""

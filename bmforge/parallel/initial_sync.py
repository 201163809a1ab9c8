"""Makes initial parameters and buffers equal on all processes by broadcasting those of rank 0."""

from __future__ import annotations

from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from bmforge.errors import ConfigError
from bmforge.logging import get_logger

__all__ = ["sync_module_states_"]


def sync_module_states_(model: nn.Module, mesh: DeviceMesh) -> None:
    """Broadcast those parameters and buffers of rank 0 that differ on another process.

    Otherwise replicas with different initial weights would stay different, because only gradients
    are averaged. Tensors on the meta device are initialized or loaded later, equally on all
    processes.

    Args:
        model: unsharded model on every process, before it is parallelized.
        mesh: mesh over all processes.

    Raises:
        ConfigError: the models of the processes differ in names, shapes or dtypes.

    Comm: an all-reduce of two integers; if some tensors are not on the meta device, an all-reduce
        of two integers per tensor, and a broadcast of each tensor that differs.
    """
    every = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    materialized = {name: tensor for name, tensor in every.items() if not tensor.is_meta}
    if mesh.size() == 1:
        return
    signature = [(name, tuple(t.shape), str(t.dtype)) for name, t in materialized.items()]
    if not _is_same_everywhere(_hash(repr(signature).encode()), mesh):
        raise ConfigError(
            f"the processes have different models ({type(model).__name__}): the names, shapes or "
            "dtypes of the tensors differ. Build the same model on every process, or build the "
            "model on the meta device."
        )
    different = _find_different(list(materialized.values()), mesh)
    names = [name for name, differs in zip(materialized, different, strict=True) if differs]
    for name in names:
        _send(materialized[name].detach(), mesh)
    if names and dist.get_rank() == 0:
        get_logger().warning(
            (
                "%d of %d tensors were initialized differently on other processes (%s, ...), so "
                "all processes use the values of rank 0. Set the same random seed on every "
                "process before building the model, or build the model on the meta device."
            ),
            *(len(names), len(materialized), names[0]),
        )


def _hash(content: bytes) -> int:
    # Without the lowest bit: torch's collectives support int64, but not uint64.
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little") >> 1


def _is_same_everywhere(number: int, mesh: DeviceMesh) -> bool:
    """Return True, on all processes, if all processes have the same number."""
    return not bool(_differs(torch.tensor([number], device=mesh.device_type)).any())


def _differs(numbers: Tensor) -> Tensor:
    """Return a mask, equal on all processes, of the numbers that differ between processes."""
    # The maximum of ~x is ~(minimum of x), so one all-reduce gives both; -x would overflow.
    both = torch.stack((numbers, ~numbers))
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    return both[0] != ~both[1]


def _find_different(tensors: list[Tensor], mesh: DeviceMesh) -> list[bool]:
    sums = [_add_up(tensor.detach()).to(mesh.device_type) for tensor in tensors]
    return _differs(torch.stack(sums)).tolist() if sums else []


def _add_up(tensor: Tensor) -> Tensor:
    """Return a checksum of a tensor: the sum of its bytes as int64 words."""
    content = tensor.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)
    end = content.numel() // 8 * 8
    return content[:end].view(torch.int64).sum() + content[end:].sum()


def _send(tensor: Tensor, mesh: DeviceMesh) -> None:
    # NCCL needs the accelerator's memory, and a broadcast needs contiguous memory.
    moved = tensor.to(mesh.device_type, memory_format=torch.contiguous_format, copy=True)
    dist.broadcast(moved, src=0)
    tensor.copy_(moved)

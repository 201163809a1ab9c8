"""All processes start from the same values: where a module was drawn on each, from rank 0's."""

from __future__ import annotations

from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from bmforge.errors import ConfigError
from bmforge.logging import get_logger

__all__ = ["start_alike_"]


def start_alike_(model: nn.Module, mesh: DeviceMesh) -> None:
    """Send rank 0's parameters and buffers to all processes where any has other ones.

    Replicas that begin with other weights keep them for ever: only their gradients are averaged.
    What is on meta is drawn or loaded later, alike on all.

    Args:
        model: whole on every process, before it is laid out.
        mesh: of all processes.

    Raises:
        ConfigError: the processes have models of other names, shapes or dtypes.

    Comm: an all-reduce of two integers; where something is not on meta, one of two per tensor, and
        a broadcast of each that differs.
    """
    every = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    here = {name: tensor for name, tensor in every.items() if not tensor.is_meta}
    if mesh.size() == 1:
        return
    known = [(name, tuple(t.shape), str(t.dtype)) for name, t in here.items()]
    if not _agree(_hash(repr(known).encode()), mesh):
        raise ConfigError(
            f"processes were given different {type(model).__name__}s: names, shapes or dtypes of "
            "what they hold are not the same. Build the same model on each, or on meta on all."
        )
    different = _find_different(list(here.values()), mesh)
    names = [name for name, differs in zip(here, different, strict=True) if differs]
    for name in names:
        _send(here[name].detach(), mesh)
    if names and dist.get_rank() == 0:
        get_logger().warning(
            "%d of %d tensors were drawn otherwise on other processes (%s, ...): all go on with "
            "rank 0's. Seed every process alike before the model is built, or build it on meta.",
            *(len(names), len(here), names[0]),
        )


def _hash(content: bytes) -> int:
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little") >> 1


def _agree(number: int, mesh: DeviceMesh) -> bool:
    """Tell, on all processes alike, whether all have the same number."""
    return not bool(_differs(torch.tensor([number], device=mesh.device_type)).any())


def _differs(numbers: Tensor) -> Tensor:
    """Return, on all processes alike, which numbers are not the same on all."""
    both = torch.stack((numbers, ~numbers))
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    return both[0] != ~both[1]


def _find_different(tensors: list[Tensor], mesh: DeviceMesh) -> list[bool]:
    sums = [_add_up(tensor.detach()).to(mesh.device_type) for tensor in tensors]
    return _differs(torch.stack(sums)).tolist() if sums else []


def _add_up(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bytes, eight at a time, as they come."""
    content = tensor.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)
    end = content.numel() // 8 * 8
    return content[:end].view(torch.int64).sum() + content[end:].sum()


def _send(tensor: Tensor, mesh: DeviceMesh) -> None:
    moved = tensor.to(mesh.device_type, memory_format=torch.contiguous_format, copy=True)
    dist.broadcast(moved, src=0)
    tensor.copy_(moved)

"""BMTrain's `nccl`, over torch.distributed: collectives between storages, on any device.

What goes over which wire is the process group's business. A tensor that fills its storage may be
given in a storage's place.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bmforge.compat.bmtrain.names import NAMES
from bmforge.compat.bmtrain.runtime import config
from bmforge.compat.names import missing_names
from bmforge.errors import ConfigError, ShapeError
from bmforge.parallel.collectives import all_gather
from bmforge.parallel.collectives import reduce_scatter as scatter_sums

__all__ = [
    "NCCLCommunicator",
    "allGather",
    "allReduce",
    "broadcast",
    "commCount",
    "commRank",
    "groupEnd",
    "groupStart",
    "recv",
    "reduce",
    "reduceScatter",
    "send",
]

NCCLCommunicator = dist.ProcessGroup
_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # divided afterwards: not every backend has a mean
    "prod": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def commCount(comm: dist.ProcessGroup) -> int:  # noqa: N802
    """Return the number of processes of a group."""
    return comm.size()


def commRank(comm: dist.ProcessGroup) -> int:  # noqa: N802
    """Return this process's rank in a group."""
    return comm.rank()


def _flat(storage: Any) -> Tensor:
    """Return all of a storage as a tensor that shares it."""
    if isinstance(storage, Tensor):
        return storage.detach().view(-1)
    return torch.empty(0, dtype=storage.dtype, device=storage.device).set_(storage)


def _pair(src: Any, dst: Any, src_parts: int = 1, dst_parts: int = 1) -> tuple[Tensor, Tensor]:
    """Return both as tensors, so many parts of the one as large as so many of the other."""
    one, two = _flat(src), _flat(dst)
    if one.dtype != two.dtype or one.numel() * dst_parts != two.numel() * src_parts:
        raise ShapeError(
            f"src has {one.numel()} x {one.dtype}, dst {two.numel()} x {two.dtype}; dst must have "
            f"{one.numel() * dst_parts / src_parts:g} of the same dtype."
        )
    return one, two


def _operation(op: str) -> Any:
    if op not in _OPERATIONS:
        raise ConfigError(f"op={op!r} must be one of {', '.join(_OPERATIONS)}.")
    return _OPERATIONS[op]


@torch.no_grad()
def allReduce(src: Any, dst: Any, op: str, comm: dist.ProcessGroup) -> None:  # noqa: N802
    """Reduce `src` over the processes into `dst`, which may be the same."""
    (one, two), operation = _pair(src, dst), _operation(op)
    dist.all_reduce(two.copy_(one), operation, group=comm)
    if op == "avg":
        two.copy_(two / comm.size())


@torch.no_grad()
def reduce(src: Any, dst: Any, op: str, root: int, comm: dist.ProcessGroup) -> None:
    """Reduce `src` over the processes into `dst` of rank `root`."""
    one, two = _pair(src, dst)
    result = one.clone()
    dist.reduce(result, op=_operation(op), group=comm, group_dst=root)
    if comm.rank() == root:
        two.copy_(result / comm.size() if op == "avg" else result)


@torch.no_grad()
def broadcast(src: Any, dst: Any, root: int, comm: dist.ProcessGroup) -> None:
    """Copy `src` of rank `root` into `dst` of all; of the others, `src` is not read."""
    two = _flat(dst)
    if comm.rank() == root:
        two.copy_(_pair(src, dst)[0])
    dist.broadcast(two, group=comm, group_src=root)


@torch.no_grad()
def allGather(src: Any, dst: Any, comm: dist.ProcessGroup) -> None:  # noqa: N802
    """Put `src` of all processes, in their order, into `dst`."""
    one, two = _pair(src, dst, dst_parts=comm.size())
    two.copy_(all_gather(one, comm, 0))


@torch.no_grad()
def reduceScatter(src: Any, dst: Any, op: str, comm: dist.ProcessGroup) -> None:  # noqa: N802
    """Reduce `src` over the processes; `dst` gets this one's part."""
    one, two = _pair(src, dst, src_parts=comm.size())
    if op in ("sum", "avg"):
        total = scatter_sums(one, comm, 0)
        two.copy_(total / comm.size() if op == "avg" else total)
        return
    whole = one.clone()
    dist.all_reduce(whole, _operation(op), group=comm)
    two.copy_(whole.chunk(comm.size())[comm.rank()])


@torch.no_grad()
def send(src: Any, peer: int, comm: dist.ProcessGroup) -> None:
    """Send to rank `peer` of the group; between `groupStart` and `groupEnd`, only note it."""
    _meet(dist.isend, _flat(src), peer, comm)


@torch.no_grad()
def recv(dst: Any, peer: int, comm: dist.ProcessGroup) -> None:
    """Receive from rank `peer` of the group; see `send`."""
    _meet(dist.irecv, _flat(dst), peer, comm)


def _meet(kind: Any, tensor: Tensor, peer: int, comm: dist.ProcessGroup) -> None:
    operation = dist.P2POp(kind, tensor, group=comm, group_peer=peer)
    if config.grouped is not None:
        config.grouped.append(operation)
        return
    for work in dist.batch_isend_irecv([operation]):
        work.wait()


def groupStart() -> None:  # noqa: N802
    """Begin to collect messages that go together, so that no order of them can hang."""
    config.grouped = []


def groupEnd() -> None:  # noqa: N802
    """Exchange the collected messages."""
    operations, config.grouped = config.grouped, None
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()


__getattr__ = missing_names("bmtrain", NAMES, __all__, __name__.rpartition(".")[2])

"""BMTrain's `nccl` module, implemented with torch.distributed: collectives between storages.

A tensor that fills its storage may be passed instead of the storage.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bmforge.compat.bmtrain.runtime import config
from bmforge.errors import ConfigError, ShapeError
from bmforge.parallel.collectives import all_gather
from bmforge.parallel.collectives import reduce_scatter as scatter_sums

__all__ = [
    "NCCLCommunicator", "allGather", "allReduce", "broadcast", "commCount", "commRank", "groupEnd",
    "groupStart", "recv", "reduce", "reduceScatter", "send",
]  # fmt: skip

NCCLCommunicator = dist.ProcessGroup
_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # divided afterwards, as not every backend supports the mean
    "prod": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def commCount(comm: dist.ProcessGroup) -> int:  # noqa: N802
    """Return the number of processes in a group."""
    return comm.size()


def commRank(comm: dist.ProcessGroup) -> int:  # noqa: N802
    """Return this process's rank in a group."""
    return comm.rank()


def _flat(storage: Any) -> Tensor:
    """Return a storage as a flat tensor that shares its memory."""
    if isinstance(storage, Tensor):
        return storage.detach().view(-1)
    return torch.empty(0, dtype=storage.dtype, device=storage.device).set_(storage)


def _pair(src: Any, dst: Any, src_parts: int = 1, dst_parts: int = 1) -> tuple[Tensor, Tensor]:
    """Return source and destination as flat tensors, after checking their dtypes and sizes.

    `dst` must have ``dst_parts / src_parts`` times as many elements as `src`.
    """
    source, destination = _flat(src), _flat(dst)
    if (
        source.dtype != destination.dtype
        or source.numel() * dst_parts != destination.numel() * src_parts
    ):
        raise ShapeError(
            f"src has {source.numel()} elements of {source.dtype}, but dst has "
            f"{destination.numel()} of {destination.dtype} (needed: "
            f"{source.numel() * dst_parts / src_parts:g} elements of the same dtype)."
        )
    return source, destination


def _operation(op: str) -> Any:
    if op not in _OPERATIONS:
        raise ConfigError(f"op={op!r} must be one of {', '.join(_OPERATIONS)}.")
    return _OPERATIONS[op]


@torch.no_grad()
def allReduce(src: Any, dst: Any, op: str, comm: dist.ProcessGroup) -> None:  # noqa: N802
    """Reduce `src` over the processes into `dst`, which may be the same storage."""
    (source, destination), operation = _pair(src, dst), _operation(op)
    dist.all_reduce(destination.copy_(source), operation, group=comm)
    if op == "avg":
        destination.copy_(destination / comm.size())


@torch.no_grad()
def reduce(src: Any, dst: Any, op: str, root: int, comm: dist.ProcessGroup) -> None:
    """Reduce `src` over the processes into `dst` on rank `root`."""
    source, destination = _pair(src, dst)
    result = source.clone()
    dist.reduce(result, op=_operation(op), group=comm, group_dst=root)
    if comm.rank() == root:
        destination.copy_(result / comm.size() if op == "avg" else result)


@torch.no_grad()
def broadcast(src: Any, dst: Any, root: int, comm: dist.ProcessGroup) -> None:
    """Copy `src` of rank `root` into `dst` on all ranks; other ranks' `src` is ignored."""
    destination = _flat(dst)
    if comm.rank() == root:
        destination.copy_(_pair(src, dst)[0])
    dist.broadcast(destination, group=comm, group_src=root)


@torch.no_grad()
def allGather(src: Any, dst: Any, comm: dist.ProcessGroup) -> None:  # noqa: N802
    """Gather `src` of all processes into `dst`, in rank order."""
    source, destination = _pair(src, dst, dst_parts=comm.size())
    destination.copy_(all_gather(source, comm, 0))


@torch.no_grad()
def reduceScatter(src: Any, dst: Any, op: str, comm: dist.ProcessGroup) -> None:  # noqa: N802
    """Reduce `src` over the processes; `dst` receives this rank's shard."""
    source, destination = _pair(src, dst, src_parts=comm.size())
    if op in ("sum", "avg"):
        total = scatter_sums(source, comm, 0)
        destination.copy_(total / comm.size() if op == "avg" else total)
        return
    reduced = source.clone()
    dist.all_reduce(reduced, _operation(op), group=comm)
    destination.copy_(reduced.chunk(comm.size())[comm.rank()])


@torch.no_grad()
def send(src: Any, peer: int, comm: dist.ProcessGroup) -> None:
    """Send a storage to rank `peer`; between `groupStart` and `groupEnd` it is only queued."""
    _meet(dist.isend, _flat(src), peer, comm)


@torch.no_grad()
def recv(dst: Any, peer: int, comm: dist.ProcessGroup) -> None:
    """Receive a storage from rank `peer`; see `send`."""
    _meet(dist.irecv, _flat(dst), peer, comm)


def _meet(kind: Any, tensor: Tensor, peer: int, comm: dist.ProcessGroup) -> None:
    operation = dist.P2POp(kind, tensor, group=comm, group_peer=peer)
    if config.grouped is not None:
        config.grouped.append(operation)
        return
    for work in dist.batch_isend_irecv([operation]):
        work.wait()


def groupStart() -> None:  # noqa: N802
    """Start queuing messages that are exchanged together, which avoids deadlocks."""
    config.grouped = []


def groupEnd() -> None:  # noqa: N802
    """Exchange the queued messages."""
    operations, config.grouped = config.grouped, None
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()

"""Initialization of torch.distributed from the environment of torchrun, or as a single process."""

from __future__ import annotations

import atexit
import copy
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from bmforge.device import backend_for, default_device, is_host
from bmforge.errors import DistributedError

__all__ = [
    "World",
    "init_distributed",
    "joined_world",
    "launched_processes",
    "leave_at_exit",
    "restarts_failed",
    "run_everywhere",
    "run_on_first",
    "shutdown_distributed",
]

T = TypeVar("T")
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class World:
    """Rank and device of this process.

    Args:
        rank: global rank.
        size: number of processes.
        device: compute device of this process.
    """

    rank: int
    size: int
    device: torch.device


def init_distributed(*, device: torch.device | None = None, timeout_s: float = 600.0) -> World:
    """Initialize the process group if needed; return this process's rank and device.

    torchrun's environment variables are used if they are set; otherwise the group has one process.
    A group that the program has already initialized is kept.

    Args:
        device: compute device; None means the accelerator of the local rank, or the CPU.
        timeout_s: timeout of collectives in seconds.

    Raises:
        DistributedError: the launcher's environment is incomplete, or other processes do not join.
    """
    device = device or default_device(int(os.environ.get("LOCAL_RANK", "0")))
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
    if not dist.is_initialized():
        _join(device, timedelta(seconds=timeout_s))
    if is_host(device):
        atexit.unregister(leave_at_exit)
        atexit.register(leave_at_exit)
    return World(dist.get_rank(), dist.get_world_size(), device)


def launched_processes() -> int:
    """Return the number of processes that the launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def joined_world(default: World) -> World:
    """Return the global rank and the number of processes, without joining a process group.

    Args:
        default: device of this process; and its rank and size if it has joined no group.
    """
    if not dist.is_initialized():
        return default
    return World(dist.get_rank(), dist.get_world_size(), default.device)


def _join(device: torch.device, timeout: timedelta) -> None:
    # With a device, NCCL connects now instead of in the first collective, and barriers need not
    # guess the device.
    device_id = None if is_host(device) else torch.device(device.type, device.index or 0)
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        dist.init_process_group(
            backend_for(device),
            # A store inside the process: without a launcher no port is opened.
            store=dist.HashStore(),
            rank=0,
            world_size=1,
            timeout=timeout,
            device_id=device_id,
        )
        return
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing:
        raise DistributedError(
            f"environment variables are missing: {', '.join(missing)} (the launcher sets them). "
            "Start with `torchrun --nproc-per-node N -m bmforge ...`, or unset RANK and WORLD_SIZE "
            "to run a single process."
        )
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            world_size=size,
            is_master=rank == 0 and not agent_hosts,
            timeout=timeout,
            multi_tenant=True,
        )
        # The agent's store outlives a restart of the workers; without a prefix per restart they
        # find the dead workers' addresses in it and never connect.
        generation = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"bmforge/restart{generation}", store)
        dist.init_process_group(
            backend_for(device),
            store=store,
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=device_id,
        )
    except (dist.DistError, RuntimeError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise DistributedError(
            f"rank {rank} of {size} could not join the process group at {address}. Check that all "
            f"processes were started, with the same MASTER_ADDR and MASTER_PORT. The error: {error}"
        ) from error


def restarts_failed() -> bool:
    """Return True if the launcher restarts processes that exit with a nonzero status."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def run_on_first(function: Callable[[], T]) -> T | None:
    """Run a function on rank 0 while the other ranks wait; raise its exception on every rank.

    An exception that cannot be pickled is raised as a DistributedError with its type and text on
    the other ranks.

    Returns:
        result of the function on rank 0; None on the others
    """
    result, problem = None, None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            result = function()
        except Exception as error:
            problem = error
    if dist.is_initialized() and dist.get_world_size() > 1:
        # Every rank must raise: otherwise the others would wait in the next collective.
        sent = [_sendable(problem)]
        dist.broadcast_object_list(sent, src=0)
        problem = problem or sent[0]
    if problem is not None:
        raise problem
    return result


def run_everywhere(function: Callable[[], T]) -> T:
    """Run a function on every process; raise the first failure of any process on all of them.

    An exception that cannot be pickled is raised as a DistributedError with its type and text on
    the other ranks.

    Returns:
        result of the function on this process
    """
    result, problem = None, None
    try:
        result = function()
    except Exception as error:
        problem = error
    problems: list[Exception | None] = [problem]
    if dist.is_initialized() and dist.get_world_size() > 1:
        problems *= dist.get_world_size()
        dist.all_gather_object(problems, _sendable(problem))
        if problem is not None:
            problems[dist.get_rank()] = problem  # the original, with its traceback
    for failure in problems:
        if failure is not None:
            raise failure
    return cast(T, result)


def _sendable(problem: Exception | None) -> Exception | None:
    """Return an exception if it can be pickled, otherwise a DistributedError with its text.

    All ranks receive the returned exception.
    """
    try:
        pickle.dumps(problem)
        rebuilt = copy.deepcopy(problem)  # rebuilds the exception as unpickling does
    except Exception:
        rebuilt = None
    if type(rebuilt) is type(problem) and str(rebuilt) == str(problem):
        return problem
    return DistributedError(f"rank {dist.get_rank()} failed: {type(problem).__name__}: {problem}")


def leave_at_exit() -> None:
    """Exit handler: destroy the process group if the program has not done so.

    A gloo thread needs the interpreter to release the tensors of the last collective; it aborts the
    process if the interpreter is already finalizing. After an unhandled exception the process group
    is not destroyed, since that would wait for the other processes. `sys.exit` with any status
    counts as a regular exit.
    """
    if getattr(sys, "last_type", None) is None:
        shutdown_distributed()


def shutdown_distributed() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()

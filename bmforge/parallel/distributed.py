"""Joining the other processes: torchrun's environment, or a single process."""

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
    """Who this process is among all of them.

    Args:
        rank: global rank.
        size: number of processes.
        device: what this process computes on.
    """

    rank: int
    size: int
    device: torch.device


def init_distributed(*, device: torch.device | None = None, timeout_s: float = 600.0) -> World:
    """Join the process group and return this process's place in it.

    Under torchrun its environment is used; without a launcher the group is this one process. A
    group that the program has initialised itself is adopted as it is.

    Args:
        device: what to compute on; None takes the accelerator of the local rank, or the CPU.
        timeout_s: how long a collective may wait for another process.

    Raises:
        DistributedError: the launcher's environment is incomplete, or the others do not come.
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


def _join(device: torch.device, timeout: timedelta) -> None:
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        dist.init_process_group(
            backend_for(device), store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )
        return
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing:
        raise DistributedError(
            f"the launcher's environment lacks {', '.join(missing)}. Start with "
            "`torchrun --nproc-per-node N -m bmforge ...`, or unset RANK and WORLD_SIZE for one "
            "process."
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
            backend_for(device), store=store, rank=rank, world_size=size, timeout=timeout
        )
    except (dist.DistError, RuntimeError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise DistributedError(
            f"rank {rank} of {size} could not join the others at {address}: {error}"
        ) from error


def restarts_failed() -> bool:
    """Tell whether the launcher starts processes again that end with another status than 0."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def run_on_first(function: Callable[[], T]) -> T | None:
    """Run a function on rank 0 while the others wait; what it raises is raised on every rank.

    What cannot be sent is a DistributedError on the others, with its type and text.

    Returns:
        what it returned, on rank 0; None on the others.
    """
    result, problem = None, None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            result = function()
        except Exception as error:
            problem = error
    if dist.is_initialized() and dist.get_world_size() > 1:
        sent = [_sendable(problem)]
        dist.broadcast_object_list(sent, src=0)
        problem = problem or sent[0]
    if problem is not None:
        raise problem
    return result


def run_everywhere(function: Callable[[], T]) -> T:
    """Run a function on every process; if it fails on any, the first failure is raised on all.

    What cannot be sent is a DistributedError on the others, with its type and text.

    Returns:
        what it returned here.
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
            problems[dist.get_rank()] = problem  # as it is, with its traceback
    for found in problems:
        if found is not None:
            raise found
    return cast(T, result)


def _sendable(problem: Exception | None) -> Exception | None:
    """Return an exception as other processes can have it: not every one can be made again."""
    try:
        pickle.dumps(problem)
        made = copy.deepcopy(problem)  # in the way of unpickling
    except Exception:
        made = None
    if type(made) is type(problem) and str(made) == str(problem):
        return problem
    return DistributedError(f"rank {dist.get_rank()} failed: {type(problem).__name__}: {problem}")


def leave_at_exit() -> None:
    """Leave the group at the end of a program that has not left it itself.

    A thread of gloo lets go of the last collective's tensors, for which it needs the interpreter;
    where that is already ending, the process aborts. One that an exception ended does not wait for
    the others; `sys.exit` is an end as any other, whatever its status.
    """
    if getattr(sys, "last_type", None) is None:
        shutdown_distributed()


def shutdown_distributed() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()

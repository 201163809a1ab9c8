"""Naming the process that is gone: what a failed collective says is only that somebody is.

Whoever sees a collective fail says so in the store through which the processes met; whoever has not
said so a little later is dead or hangs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from bmforge.errors import BmforgeError, DistributedError

__all__ = ["name_the_missing"]

_GRACE_S = 3.0
_PAUSE_S = 0.1
# In what the backends raise when another process is gone or does not answer.
_WORDS = ("gloo", "Connection closed", "Connection reset", "Timed out", "timeout", "NCCL")


@contextmanager
def name_the_missing(occasion: str) -> Iterator[None]:
    """Turn the failure of a collective inside into an error that names who is missing.

    Args:
        occasion: what the processes are doing, named alike on all of them, such as the step and its
            part.

    Raises:
        DistributedError: a collective failed; says where, and which ranks are dead or hang.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if isinstance(error, BmforgeError) or not any(word in text for word in _WORDS):
            raise
        who = _say_who(occasion)
        raise DistributedError(
            f"{occasion}: a collective failed on rank {dist.get_rank()}; {who}. The backend says: "
            f"{text}"
        ) from error


def _say_who(occasion: str) -> str:
    try:
        silent = _call_roll(occasion)
    except RuntimeError:
        return "the process that keeps the store is gone: rank 0, or the launcher of its machine"
    return f"ranks {silent} are dead or hang" if silent else "all ranks are still there"


def _call_roll(occasion: str) -> list[int]:
    """Say that a collective failed here; return the ranks that do not say so in time."""
    store, rank, size = _get_default_store(), dist.get_rank(), dist.get_world_size()
    keys = {other: f"bmforge/failed/{occasion}/{other}" for other in range(size)}
    store.set(keys[rank], "here")
    end = time.monotonic() + _GRACE_S
    while True:
        silent = [other for other, key in keys.items() if not store.check([key])]
        if not silent or time.monotonic() > end:
            return silent
        time.sleep(_PAUSE_S)

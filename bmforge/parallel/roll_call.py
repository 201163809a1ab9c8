"""Naming the process that is gone: what a failed collective says is only that somebody is.

Whoever sees a collective fail calls the roll in the store through which the processes met. A thread
answers on every process that lives, also where the main one waits for others; who does not answer
is dead. All learn that, and who would wait on for one that is gone ends as well.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from bmforge.errors import BmforgeError, DistributedError
from bmforge.logging import get_logger

__all__ = ["RollCall"]

_GRACE_S = 3.0  # for answers
_PAUSE_S = 0.1
_LISTEN_S = 0.5  # between looks whether the roll is called
_LEAVE_S = 1.0  # for the main thread to see the failure by itself
_CALL, _VERDICT = "bmforge/roll/call", "bmforge/roll/verdict"
# In what the backends raise when another process is gone or does not answer.
_WORDS = ("gloo", "Connection closed", "Connection reset", "Timed out", "timeout", "NCCL")
_NO_STORE = "the process that keeps the store is gone: rank 0, or the launcher of its machine"


class RollCall:
    """Says of this process that it lives, and finds out who does not."""

    def __init__(self) -> None:
        self._occasion: str | None = None  # of the collectives that the main thread is at

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Answer roll calls inside; in a single process do nothing."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            yield
            return
        stop = threading.Event()
        given = _get_default_store(), dist.get_rank(), stop
        thread = threading.Thread(
            target=self._listen, args=given, name="bmforge-roll-call", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    @contextmanager
    def name_the_missing(self, occasion: str) -> Iterator[None]:
        """Turn the failure of a collective inside into an error that names who is missing.

        Args:
            occasion: what the processes are doing, such as the step and its part.

        Raises:
            DistributedError: a collective failed; says where, and which ranks are dead or hang.
        """
        self._occasion = occasion
        try:
            yield
        except RuntimeError as error:
            self._occasion = None
            text = str(error)
            # One of ours that has another cause than the backend's failure has its own words.
            is_own = isinstance(error, BmforgeError) and not isinstance(
                error.__cause__, RuntimeError
            )
            if is_own or not any(word in text for word in _WORDS):
                raise
            who = _say_who(occasion)
            raise DistributedError(
                f"{occasion}: a collective failed on rank {dist.get_rank()}; {who}. The backend "
                f"says: {text}"
            ) from error
        finally:
            self._occasion = None

    def _listen(self, store: dist.Store, rank: int, stop: threading.Event) -> None:
        try:
            while not store.check([_CALL]):
                if stop.wait(_LISTEN_S):
                    return
            store.set(_answer(rank), "here")
            while not store.check([_VERDICT]):
                if stop.wait(_PAUSE_S):
                    return
            verdict = store.get(_VERDICT).decode()
        except RuntimeError:
            verdict = _NO_STORE
        occasion = self._occasion
        if occasion is None or stop.wait(_LEAVE_S) or self._occasion != occasion:
            return
        # It waits inside the backend for one that waits itself; no exception reaches it there.
        get_logger().error("%s: rank %d was waiting for others; %s", occasion, rank, verdict)
        os._exit(1)


def _answer(rank: int) -> str:
    return f"bmforge/roll/here/{rank}"


def _say_who(occasion: str) -> str:
    try:
        return _call_roll(occasion)
    except RuntimeError:
        return _NO_STORE


def _call_roll(occasion: str) -> str:
    """Return who is dead; where all live, who did not see a collective fail as well."""
    store, rank, ranks = _get_default_store(), dist.get_rank(), range(dist.get_world_size())
    failed = {other: f"bmforge/failed/{occasion}/{other}" for other in ranks}
    store.set(failed[rank], "here")
    store.set(_answer(rank), "here")
    store.set(_CALL, occasion)
    end = time.monotonic() + _GRACE_S
    while time.monotonic() < end:
        if store.check([_VERDICT]):
            return store.get(_VERDICT).decode()
        if all(store.check([key]) for key in failed.values()):
            return "all ranks are still there"
        time.sleep(_PAUSE_S)
    dead = [other for other in ranks if not store.check([_answer(other)])]
    if not dead:
        silent = [other for other, key in failed.items() if not store.check([key])]
        return f"all ranks live, but {silent} hang or wait for others"
    return store.compare_set(_VERDICT, "", f"ranks {dead} are dead or hang").decode()

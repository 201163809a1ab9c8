"""Detects dead or hanging processes, reports their ranks, and ends the waiting processes.

A collective that waits for a dead process fails after a timeout or never, and does not report the
rank. So a thread of every process writes a heartbeat, the current time, into the rendezvous store.
Each process watches the heartbeat of the next rank, so the work per process does not depend on the
number of processes. The heartbeat of a process stops when it exits or receives SIGSTOP, whatever
its main thread is doing.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from bmforge.errors import BmforgeError, DistributedError
from bmforge.logging import get_logger
from bmforge.parallel.groups import group_timeout

__all__ = ["FailureDetector"]

_BEAT_S = 0.5
_SCAN_S = 2.5  # every heartbeat must advance within this time after a failed collective
_LEAVE_S = 2.0  # time for the main thread to notice the failure by itself
_UNWIND_S = 5.0  # time for a main thread that has noticed it to exit
_STORE_S = 5.0  # timeout of the store
_VERDICT = "bmforge/liveness/verdict"
_LEFT = "left"  # the heartbeat of a process that does not train any more
# Words in the errors of the backends when another process is gone or does not answer.
_BACKEND_ERRORS = ("gloo", "Connection closed", "Connection reset", "Timed out", "timeout", "NCCL")
_NO_STORE = "the process that hosts the store (rank 0 or the launcher) does not answer"


class FailureDetector:
    """Sends this process's heartbeat, watches the next rank's, and exits on a failure."""

    def __init__(self) -> None:
        self._occasion = "waiting for other processes"
        self._is_watching = False
        self._failed: str | None = None  # occasion at which a collective failed
        self._scanned = threading.Event()
        self._finding = _NO_STORE

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager: detect failures of other ranks; does nothing with a single process.

        If a rank sends no heartbeat within the timeout of the process group, every process logs
        that rank and exits with status 1, unless its main thread has already ended with an error.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            yield
            return
        stop = threading.Event()
        thread = threading.Thread(
            target=self._watch, args=(stop,), name="bmforge-failure-detector", daemon=True
        )
        thread.start()
        self._is_watching = True
        try:
            yield
        finally:
            self._is_watching = False
            stop.set()
            thread.join(_STORE_S)  # the store may not answer any more

    @contextmanager
    def naming_failures(self, occasion: str) -> Iterator[None]:
        """Context manager: if a collective fails, raise an error that names the failed ranks.

        Args:
            occasion: description of the collectives for the error, such as the step and its phase.

        Raises:
            DistributedError: a collective failed; the message names the dead or hanging ranks.
        """
        before, self._occasion = self._occasion, occasion
        try:
            yield
        except RuntimeError as error:
            # bmforge errors are already clear, unless caused by a failure of the backend.
            is_own = isinstance(error, BmforgeError) and not isinstance(
                error.__cause__, RuntimeError
            )
            if is_own or not any(word in str(error) for word in _BACKEND_ERRORS):
                raise
            raise DistributedError(
                f"{occasion}: a collective failed on rank {dist.get_rank()}; "
                f"{self._find_failed(occasion)}. The error of the backend: {error}"
            ) from error
        finally:
            self._occasion = before

    def _find_failed(self, occasion: str) -> str:
        """Wait until the watcher thread has found the failed ranks, and return its report.

        The main thread does not access the store itself, because such a call could block forever.
        """
        if not self._is_watching:
            return "the failed rank is unknown outside of FailureDetector.watching()"
        self._failed = occasion
        # The watcher scans for `_SCAN_S`; one of its accesses to the store may first have to time
        # out.
        self._scanned.wait(_SCAN_S + _STORE_S)
        return self._finding

    def _watch(self, stop: threading.Event) -> None:
        verdict: str | None = None
        try:
            verdict = self._beat_until_failure(
                _Heartbeats(_get_default_store(), dist.get_rank(), dist.get_world_size()), stop
            )
        except RuntimeError:
            verdict = None if stop.is_set() else _NO_STORE
        leave_s = _UNWIND_S if self._scanned.is_set() and self._failed else _LEAVE_S
        if verdict is None or stop.wait(leave_s):
            return
        # The main thread waits inside the backend, where no exception reaches it.
        get_logger().error(
            "%s: rank %d exits, because %s", self._occasion, dist.get_rank(), verdict
        )
        os._exit(1)

    def _beat_until_failure(self, beats: _Heartbeats, stop: threading.Event) -> str | None:
        """Send heartbeats until a failure is found or `stop` is set; return the failure."""
        try:
            while not stop.is_set():
                beats.beat()
                if (verdict := beats.verdict()) is not None:
                    self._finish_scan(verdict)
                    return verdict
                if self._failed is not None and not self._scanned.is_set():
                    self._finish_scan(beats.scan(self._failed))
                if beats.next_is_silent():
                    beats.find_silent()
                stop.wait(_BEAT_S)
            return None
        finally:
            if stop.is_set():
                beats.leave()

    def _finish_scan(self, finding: str) -> None:
        self._finding = finding
        self._scanned.set()


class _Heartbeats:
    """Heartbeats of all ranks in the rendezvous store.

    Args:
        store: rendezvous store.
        rank: rank of this process.
        size: number of processes.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._timeout_s = group_timeout().total_seconds()
        self._next, self._seen_at = "", time.monotonic()

    def beat(self) -> None:
        """Write a new heartbeat of this rank to the store."""
        # Readers only look for a change, so the clocks of the machines need not agree.
        self._store.set(_beat_key(self._rank), str(time.monotonic_ns()))

    def leave(self) -> None:
        """Announce that this rank has finished, so that no rank waits for its heartbeat."""
        self._store.set(_beat_key(self._rank), _LEFT)

    def verdict(self) -> str | None:
        """Return the failure that any rank has published; None if there is none."""
        return self._store.get(_VERDICT).decode() if self._store.check([_VERDICT]) else None

    def next_is_silent(self) -> bool:
        """Return True if the next rank's heartbeat has not changed for the timeout."""
        now = self._read((self._rank + 1) % self._size)
        # A rank that does not watch yet, or has left, cannot be silent.
        if now != self._next or now in ("", _LEFT):
            self._next, self._seen_at = now, time.monotonic()
        return time.monotonic() - self._seen_at > self._timeout_s

    def scan(self, occasion: str) -> str:
        """Return a description of why a collective failed on this rank.

        Args:
            occasion: description of the collective, the same on all participating ranks.
        """
        failed = [f"bmforge/liveness/failed/{occasion}/{rank}" for rank in range(self._size)]
        self._store.set(failed[self._rank], "")
        verdict = self.find_silent(failed)
        if verdict is not None:
            return verdict
        waiting = [rank for rank, key in enumerate(failed) if not self._store.check([key])]
        if not waiting:
            return "all ranks are alive"
        return f"all ranks are alive, but ranks {waiting} hang or wait for others"

    def find_silent(self, failed: Sequence[str] = ()) -> str | None:
        """Find the ranks whose heartbeats do not change, and publish them as the verdict.

        Args:
            failed: store keys that the ranks set when a collective fails; if all keys are set, all
                ranks are alive.

        Returns:
            description of the failure, or None if all ranks are alive
        """
        before = [self._read(rank) for rank in range(self._size)]
        end = time.monotonic() + _SCAN_S
        while time.monotonic() < end:
            self.beat()
            if (verdict := self.verdict()) is not None:
                return verdict
            if failed and all(self._store.check([key]) for key in failed):
                return None
            time.sleep(_BEAT_S / 2)
        after = [self._read(rank) for rank in range(self._size)]
        # A rank that has left is the cause only if no other rank is silent.
        silent = [rank for rank, beat in enumerate(after) if beat == before[rank] != _LEFT]
        silent = silent or [rank for rank, beat in enumerate(after) if beat == _LEFT]
        if not silent:
            return None
        message = f"ranks {silent} are dead or hang"
        # The first verdict wins, so that all ranks report the same one.
        return self._store.compare_set(_VERDICT, "", message).decode()

    def _read(self, rank: int) -> str:
        key = _beat_key(rank)
        return self._store.get(key).decode() if self._store.check([key]) else ""


def _beat_key(rank: int) -> str:
    return f"bmforge/liveness/beat/{rank}"

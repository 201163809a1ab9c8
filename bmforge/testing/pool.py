"""Pool of gloo worker processes for the whole test run.

Starting four processes that import torch takes seconds; a job on a running pool takes about 0.1 s.
Every job has a new default process group, so no state leaks between tests. If a worker dies (gloo
aborts the process on some errors) or hangs, the error names it, and the next job restarts the pool.
If a worker was killed by a signal, the job is repeated once on new workers; if it then succeeds,
only a warning is logged.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing as mp
import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import _collective_utils, _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from bmforge.errors import DistributedError

__all__ = ["WorkerPool", "run_distributed", "shutdown_pool"]

# Seconds to wait for the other ranks after one has failed; they usually wait in a collective
# forever.
_GRACE_S = 5.0


class _CrashError(DistributedError):
    """Raised if a worker was killed by a signal."""


def _serve(rank: int, connection: Connection, log_path: str) -> None:
    """Run jobs until the connection is closed; a crash is written to the file `log_path`."""
    torch.set_num_threads(1)
    crash_log = open(log_path, "w")  # noqa: SIM115 - open as long as the process
    faulthandler.enable(crash_log)
    modules = 0
    while True:
        if len(sys.modules) > modules:  # exclude imported objects from garbage collection
            modules = len(sys.modules)
            gc.freeze()
        try:
            job = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        connection.send_bytes(pickle.dumps(_run_job(rank, *job)))


def _run_job(
    rank: int, world: int, port: int, job_number: int, path: list[str], payload: bytes
) -> tuple[bool, Any]:
    """Run a function in a new process group; return (ok, result or traceback)."""
    sys.path[:] = path
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    try:
        store = dist.PrefixStore(
            f"job{job_number}", dist.TCPStore("127.0.0.1", port, is_master=False)
        )
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        dist.barrier()  # otherwise a short job might end before all ranks are connected
        function, args, kwargs = pickle.loads(payload)
        torch.manual_seed(0)
        return True, function(*args, **kwargs)
    except Exception:
        return False, traceback.format_exc()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """Clear torch's caches of meshes, and collect garbage, after a job.

    The cached meshes have destroyed process groups and compare equal to the meshes of later jobs,
    and each of these groups keeps three threads that wake up a hundred times per second.
    """
    _clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    gc.collect()


@dataclass
class _Worker:
    """A worker process with its connection and the file of its crash log."""

    process: Any
    connection: Connection
    last_words: Any

    def describe_end(self) -> str:
        """Return a text with the worker's exit code and crash log."""
        self.process.join(timeout=1)
        message = f"the process died with exit code {self.process.exitcode}"
        words = self.last_words.read().partition("\nExtension modules")[0]
        return f"{message}\n{words}" if words else message


@dataclass
class WorkerPool:
    """Pool of worker processes, which grows to the largest world size used."""

    _workers: list[_Worker] = field(default_factory=list)
    _jobs: int = 0
    _store: dist.TCPStore | None = None

    def run(
        self,
        function: Callable[..., Any],
        world: int,
        *args: Any,
        timeout_s: float = 120.0,
        **kwargs: Any,
    ) -> list[Any]:
        """Run ``function(*args, **kwargs)`` on `world` ranks and return their results.

        Args:
            function: function in an importable module, which is pickled by name.
            world: number of processes.
            args: positional arguments, pickled.
            timeout_s: time limit in seconds; the error names the ranks without a result.
            kwargs: keyword arguments, pickled.

        Raises:
            DistributedError: a rank raised an error, died or hung; the message has the rank and the
                traceback.
        """
        payload = pickle.dumps((function, args, kwargs))
        try:
            return self._run(payload, world, timeout_s)
        except _CrashError as crash:
            warnings.warn(
                f"{function.__name__} is run again, because a worker crashed: {crash}", stacklevel=3
            )
        return self._run(payload, world, timeout_s)

    def _run(self, payload: bytes, world: int, timeout_s: float) -> list[Any]:
        self._grow(world)
        assert self._store is not None
        self._jobs += 1
        job = pickle.dumps((world, self._store.port, self._jobs, sys.path, payload))
        for worker in self._workers[:world]:
            worker.connection.send_bytes(job)
        try:
            return self._collect(world, timeout_s)
        except DistributedError:
            raise
        except BaseException:  # interrupted: the next job would get the answers to this one
            self.close()
            raise

    def _grow(self, world: int) -> None:
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["bmforge.testing.pool", "torch.distributed.tensor"])
        for rank in range(len(self._workers), world):
            parent_end, child_end = context.Pipe()
            log = tempfile.NamedTemporaryFile("r", prefix="bmforge-worker-")  # noqa: SIM115
            process = context.Process(target=_serve, args=(rank, child_end, log.name), daemon=True)
            process.start()
            child_end.close()
            self._workers.append(_Worker(process, parent_end, log))

    def _collect(self, world: int, timeout_s: float) -> list[Any]:
        results: dict[int, tuple[bool, Any]] = {}
        has_crashed = False
        deadline = time.monotonic() + timeout_s
        while len(results) < world:
            workers = enumerate(self._workers[:world])
            waiting = {w.connection: rank for rank, w in workers if rank not in results}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                try:
                    results[rank] = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    worker = self._workers[rank]
                    results[rank] = (False, worker.describe_end())
                    has_crashed = has_crashed or (worker.process.exitcode or 0) < 0
                if not results[rank][0]:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        silent = [rank for rank in range(world) if rank not in results]
        if silent or any(not w.process.is_alive() for w in self._workers[:world]):
            self.close()
        failed = {rank: text for rank, (ok, text) in results.items() if not ok}
        if failed or silent:
            lines = [f"rank {rank}: {text}" for rank, text in sorted(failed.items())]
            hung = [f"ranks {silent} did not answer and were stopped"] if silent else []
            kind = _CrashError if has_crashed else DistributedError
            raise kind("\n".join(lines + hung))
        return [results[rank][1] for rank in range(world)]

    def close(self) -> None:
        """Stop all workers; the next job starts new ones."""
        for worker in self._workers:
            worker.connection.close()
            worker.process.kill()
            worker.process.join()
            worker.last_words.close()
        self._workers.clear()


_POOL = WorkerPool()
atexit.register(_POOL.close)


def run_distributed(
    function: Callable[..., Any], world: int, *args: Any, **kwargs: Any
) -> list[Any]:
    """Run a function on `world` gloo processes of the shared pool; see `WorkerPool.run`."""
    return _POOL.run(function, world, *args, **kwargs)


def shutdown_pool() -> None:
    """Stop the shared pool's workers."""
    _POOL.close()

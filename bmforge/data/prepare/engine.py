"""Runs a stage of `prepare` in this process, or in worker processes, which may crash.

A stage consists of parts, usually one per shard. Only the parent process writes the journal; a
worker only writes files. Each worker writes the index of its current entry to shared memory. The
parent kills a worker that exceeds the memory limit or the time limit per entry, and runs the part
again without that entry. If a worker crashes, its part is run once more, since the entry may not be
the cause; if a worker crashes on the same entry again, the entry is skipped.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

from bmforge.data.prepare.temporary import mark_temporary_dir
from bmforge.errors import ConfigError, DataError
from bmforge.logging import get_logger

__all__ = ["Beat", "SkippedEntry", "Limits", "StagePart", "Work", "run_parts"]

_LOOK_EVERY_S = 0.2
_NAME_BYTES = 512
Beat = Callable[[int, bool, str], None]


class Limits(NamedTuple):
    """Limits per input entry: seconds of processing, and resident bytes of the worker process."""

    seconds: float
    memory_bytes: int


class SkippedEntry(NamedTuple):
    """An input entry that is skipped because it exceeded a limit or crashed a worker.

    Attributes:
        entry: index of the entry in the part.
        in_reading: True if reading the entry from the source failed.
        rule: ``time``, ``memory`` or ``crash``.
        value: seconds, resident bytes, or exit code.
        bound: limit that was exceeded; None for a crash.
        name: source file and location of the entry, if known.
    """

    entry: int
    in_reading: bool
    rule: str
    value: float
    bound: float | None
    name: str


@dataclass(frozen=True)
class StagePart:
    """One part of a stage (usually a shard): its index, its task, and the entries to skip."""

    number: int
    task: Any
    skipped: tuple[SkippedEntry, ...] = ()


Work = Callable[[StagePart, Beat], Any]


def run_parts(
    work: Work,
    parts: Sequence[StagePart],
    workers: int,
    limits: Limits,
    on_skip: Callable[[int, SkippedEntry], None],
) -> Iterator[tuple[int, Any]]:
    """Run the parts of a stage in any order; yield (index, result) of each.

    Args:
        work: module-level function of a part and a `Beat` callback; it calls the callback with each
            entry's index, whether the entry is still being read, and its name.
        workers: number of processes; 0 to run in this process, without limits.
        limits: limits of one entry.
        on_skip: callback for each skipped entry, called before the part runs again.

    Raises:
        BmforgeError: the first error of a part, raised after the other parts have ended.
    """
    if workers == 0:
        for part in parts:
            yield part.number, work(part, lambda entry, in_reading, name: None)
        return
    pool = _Pool(work, min(workers, len(parts)), limits)
    try:
        yield from pool.run(parts, on_skip)
    finally:
        pool.close()


class _Worker:
    """A worker process with its pipe, and shared memory that contains its current entry."""

    def __init__(self, context: Any, work: Work, number_of_workers: int) -> None:
        self.pipe, child_end = context.Pipe()
        self._at = context.RawArray(ctypes.c_int64, 2)
        self._name = context.RawArray(ctypes.c_char, _NAME_BYTES)
        self.process = context.Process(
            target=_serve,
            args=(child_end, work, self._at, self._name, number_of_workers),
            daemon=True,
        )
        self.process.start()
        child_end.close()
        self.part: StagePart | None = None
        self._seen: tuple[int, int] = (-1, 0)
        self._since = 0.0

    def give(self, part: StagePart) -> None:
        self._at[0] = -1
        self.part, self._seen, self._since = part, (-1, 0), time.monotonic()
        self.pipe.send(part)

    def skip_entry(self, rule: str, value: float, bound: float | None) -> SkippedEntry:
        """Describe the worker's current entry, with the measured value and limit, to skip it."""
        name = self._name.value.decode("utf-8", "replace")
        return SkippedEntry(int(self._at[0]), bool(self._at[1]), rule, value, bound, name)

    def exceeded(self, limits: Limits) -> SkippedEntry | None:
        """Return the current entry if it exceeds a time or memory limit, else None."""
        now, at = time.monotonic(), (int(self._at[0]), int(self._at[1]))
        if at != self._seen:
            self._seen, self._since = at, now
        if at[0] < 0:
            return None
        if now - self._since > limits.seconds:
            return self.skip_entry("time", round(now - self._since, 1), limits.seconds)
        resident = _resident_bytes(self.process.pid)
        if resident > limits.memory_bytes:
            return self.skip_entry("memory", resident, limits.memory_bytes)
        return None

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class _Pool:
    """Pool of worker processes with a queue of parts."""

    def __init__(self, work: Work, workers: int, limits: Limits) -> None:
        methods = multiprocessing.get_all_start_methods()
        self._context: Any = multiprocessing.get_context(
            "forkserver" if "forkserver" in methods else "spawn"
        )
        if "forkserver" in methods:
            mark_temporary_dir()
            self._context.set_forkserver_preload([__name__, "bmforge.data"])
        self._work, self._limits, self._count = work, limits, workers
        self._workers = [self._start() for _ in range(workers)]
        self._waiting: deque[StagePart] = deque()
        self._deaths: set[tuple[int, int, bool]] = set()
        self._failed: dict[int, Exception] = {}

    def _start(self) -> _Worker:
        return _Worker(self._context, self._work, self._count)

    def run(
        self, parts: Sequence[StagePart], on_skip: Callable[[int, SkippedEntry], None]
    ) -> Iterator[tuple[int, Any]]:
        self._waiting.extend(parts)
        while True:
            for worker in self._workers:
                if worker.part is None and self._waiting:
                    worker.give(self._waiting.popleft())
            busy = [worker for worker in self._workers if worker.part is not None]
            if not busy:
                break
            connection.wait([worker.pipe for worker in busy], timeout=_LOOK_EVERY_S)
            for worker in busy:
                yield from self._check_on(worker, on_skip)
        if self._failed:
            raise self._failed[min(self._failed)]

    def _check_on(
        self, worker: _Worker, on_skip: Callable[[int, SkippedEntry], None]
    ) -> Iterator[tuple[int, Any]]:
        """Yield a worker's result if it is ready; replace a worker that crashed or hit a limit."""
        part = worker.part
        assert part is not None
        if worker.pipe.poll():
            try:
                result, error = worker.pipe.recv()
            except (EOFError, OSError):
                self._replace(worker, self._entry_to_skip(worker), on_skip)
                return
            worker.part = None
            if error is None:
                yield part.number, result
            else:
                self._failed[part.number] = error
                self._waiting.clear()
        elif skip := worker.exceeded(self._limits):
            self._replace(worker, skip, on_skip)

    def _entry_to_skip(self, worker: _Worker) -> SkippedEntry | None:
        """Return the entry to skip if a worker crashed on it for the second time, else None."""
        assert worker.part is not None
        worker.process.join()
        code = worker.process.exitcode
        skip = worker.skip_entry("crash", float(code or 0), None)
        death = (worker.part.number, skip.entry, skip.in_reading)
        if death not in self._deaths:
            self._deaths.add(death)
            return None
        if skip.entry < 0:
            raise ConfigError(
                f"a worker process exited while it was starting (exit code {code}). In a script, "
                'start workers under `if __name__ == "__main__":`, or set workers=0.'
            )
        return skip

    def _replace(
        self,
        worker: _Worker,
        skip: SkippedEntry | None,
        on_skip: Callable[[int, SkippedEntry], None],
    ) -> None:
        """Kill a worker, start a new one, and queue its part again without the skipped entry."""
        part = worker.part
        assert part is not None
        worker.end()
        if skip is not None and any(
            (earlier.entry, earlier.in_reading) == (skip.entry, skip.in_reading)
            for earlier in part.skipped
        ):
            raise DataError(
                f"{skip.name} cannot be processed: {describe_skip(skip)}. The stage cannot skip "
                "a single entry. Remove the entry from the input, or raise document_seconds or "
                "worker_memory_bytes."
            )
        if skip is not None:
            get_logger().warning("skipped %s, because %s.", skip.name, describe_skip(skip))
            on_skip(part.number, skip)
            part = replace(part, skipped=(*part.skipped, skip))
        if not self._failed:
            self._waiting.appendleft(part)
        self._workers[self._workers.index(worker)] = self._start()

    def close(self) -> None:
        for worker in self._workers:
            worker.end()


def describe_skip(skip: SkippedEntry) -> str:
    """Return the reason for skipping an entry, as a clause for messages."""
    if skip.rule == "time":
        return f"a worker needed more than {skip.bound:g} s for the entry"
    if skip.rule == "memory":
        return (
            f"a worker used {skip.value / 1000000000.0:.2f} GB of memory for the entry (limit: "
            f"{skip.bound} bytes)"
        )
    return (
        f"a worker crashed twice while processing the entry (exit code {skip.value:g}; -9 often "
        "means too little memory)"
    )


def _resident_bytes(pid: int | None) -> int:
    """Return the resident memory of a process in bytes; 0 if unknown or the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE
    except (OSError, IndexError):
        return 0


def _serve(pipe: Any, work: Work, at: Any, name: Any, number_of_workers: int) -> None:
    """Main loop of a worker process: process parts of the stage until the parent process exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this process
    if number_of_workers > 1:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def beat(entry: int, in_reading: bool, entry_name: str) -> None:
        name.value = entry_name.encode("utf-8", "replace")[: _NAME_BYTES - 1].replace(b"\0", b" ")
        at[1] = in_reading
        at[0] = entry

    while True:
        try:
            part = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer: tuple[Any, Exception | None] = work(part, beat), None
        except Exception as error:
            answer = None, _portable(error)
        pipe.send(answer)


def _portable(error: Exception) -> Exception:
    """Return `error` if it can be pickled, else a `DataError` with the same message."""
    error.add_note(traceback.format_exc())
    try:
        pickle.dumps(error)
    except Exception:
        return DataError(f"a worker process raised {type(error).__name__}: {error}")
    return error

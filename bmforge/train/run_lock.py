"""Lock file of a run directory: it contains the holder's identity and is touched as a heartbeat.

Shared file systems often do not support locks, so the file itself is the lock: it is created
atomically, and its holder updates its modification time. A dead holder is detected immediately on
the same machine, and by an outdated modification time on another machine.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from bmforge.errors import ConfigError, DistributedError
from bmforge.logging import get_logger
from bmforge.parallel import run_on_first

__all__ = ["LOCK_NAME", "RunLock", "hold_run_dir"]

LOCK_NAME = "run.lock"
_BEAT_S = 5.0
_LOOKS = 7  # missed heartbeats after which a holder counts as dead


@dataclass(frozen=True)
class _Holder:
    """Identity of the process that holds the lock; unknown fields are empty.

    Args:
        host: display name of the machine.
        machine: unique id of the machine and PID namespace.
        pid: process id.
        born: start time, which distinguishes the process from earlier ones with the same pid.
        since: time at which the process acquired the lock.
    """

    host: str = ""
    machine: str = ""
    pid: int = 0
    born: str = ""
    since: str = ""

    def is_process(self, other: _Holder) -> bool:
        """Return True if this lock holder and `other` are the same process."""
        return (self.machine, self.pid, self.born) == (other.machine, other.pid, other.born)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}" if self.pid else "a process"


def _read_word(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:  # the system is not Linux
        return ""


def _process_start_time(pid: int) -> str:
    """Return the start time of a process on this machine; "" if it is dead or unknown."""
    state, *numbers = _read_word(f"/proc/{pid}/stat").rpartition(")")[2].split() or ["X"]
    return "" if state in "XZ" else numbers[18]


def _this_process() -> _Holder:
    try:
        counted_in = os.readlink("/proc/self/ns/pid")
    except OSError:
        counted_in = ""
    machine = f"{platform.node()} {_read_word('/proc/sys/kernel/random/boot_id')} {counted_in}"
    since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    return _Holder(platform.node(), machine, os.getpid(), _process_start_time(os.getpid()), since)


class RunLock:
    """Lock of one directory: `take` it, `check` it before writing, then `release` it.

    Args:
        directory: existing directory.
        pause: function that sleeps for a number of seconds, called between checks of a holder on
            another machine.
    """

    def __init__(self, directory: Path, pause: Callable[[float], None] = time.sleep) -> None:
        self._directory, self._file, self._pause = directory, directory / LOCK_NAME, pause
        self._me = _this_process()
        self._is_mine = False
        self._stop = threading.Event()
        self._beat = threading.Thread(target=self._touch, name="bmforge-run-lock", daemon=True)

    def take(self) -> None:
        """Acquire the lock; a dead holder's lock is taken over.

        If this process already holds the lock, the first `RunLock` keeps it.

        Raises:
            ConfigError: a living process holds the lock.
        """
        while not self._make():
            text, touched = self._look()
            holder = _parse(text)
            if holder.is_process(self._me):
                return
            if text is not None and self._lives(holder, text, touched):
                raise ConfigError(
                    f"run_dir={str(self._directory)!r} is in use by {holder}. Wait until it "
                    "ends, stop it, or choose another run_dir. If no run uses the directory, "
                    f"for example because it is a copy, remove {self._file}."
                )
            if text is not None:
                self._remove(text, holder)
        self._is_mine = True
        self._beat.start()

    def check(self) -> None:
        """Raise an error if another process has taken over the lock; recreate a deleted lock file.

        Raises:
            DistributedError: the lock was taken over.
        """
        if not self._is_mine:
            return
        holder = _parse(self._look()[0])
        if not holder.is_process(self._me) and not self._make():
            raise DistributedError(
                f"run_dir={str(self._directory)!r} was taken over by {holder}, because this "
                f"process had not updated {LOCK_NAME} for {_BEAT_S * _LOOKS:.0f} s. This "
                "process stops, and writes no more files."
            )

    def release(self) -> None:
        """Release the lock."""
        if not self._is_mine:
            return
        self._stop.set()
        self._beat.join()
        if _parse(self._look()[0]).is_process(self._me):
            self._file.unlink(missing_ok=True)
        self._is_mine = False

    def _make(self) -> bool:
        """Create the lock file atomically with its content; return False if the file exists."""
        text = json.dumps(asdict(self._me))
        beside = self._file.with_name(f".{LOCK_NAME}.{os.urandom(4).hex()}")
        try:
            beside.write_text(text, encoding="utf-8")
            return self._link(beside, text)
        finally:
            beside.unlink(missing_ok=True)

    def _link(self, beside: Path, text: str) -> bool:
        try:
            os.link(beside, self._file)
        except FileExistsError:
            # NFS may report EEXIST for a retried request that succeeded.
            return beside.stat().st_nlink == 2
        except OSError:  # a file system without hard links
            try:
                with self._file.open("x", encoding="utf-8") as file:
                    file.write(text)
            except FileExistsError:
                return False
        return True

    def _look(self) -> tuple[str | None, int]:
        """Return the lock file's content (None if there is no file) and its modification time."""
        try:
            # Opening the file revalidates the NFS client's attribute cache.
            with self._file.open(encoding="utf-8", errors="replace") as file:
                return file.read(), os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            return None, 0

    def _lives(self, holder: _Holder, text: str, touched: int) -> bool:
        if holder.machine == self._me.machine and holder.born:
            return _process_start_time(holder.pid) == holder.born
        get_logger().warning(
            "%s is locked by %s; waiting %.0f s to see whether it is still running",
            *(self._directory, holder, _BEAT_S * _LOOKS),
        )
        for _ in range(_LOOKS):
            self._pause(_BEAT_S)
            if self._look() != (text, touched):
                return True
        return False

    def _remove(self, text: str, holder: _Holder) -> None:
        """Remove a dead holder's lock, unless another process has replaced it meanwhile."""
        aside = self._file.with_name(f".{LOCK_NAME}.{os.urandom(4).hex()}")
        try:
            self._file.rename(aside)
        except FileNotFoundError:
            return
        if aside.read_text(encoding="utf-8", errors="replace") != text:
            aside.rename(self._file)
            return
        aside.unlink()
        get_logger().warning(
            "%s was locked by %s, which has ended, so the lock is removed", self._directory, holder
        )

    def _touch(self) -> None:
        while not self._stop.wait(_BEAT_S):
            try:
                if _parse(self._look()[0]).is_process(self._me):
                    os.utime(self._file)
            except OSError as error:  # the network file system may recover
                get_logger().debug("%s cannot be updated: %s", self._file, error)


def _parse(text: str | None) -> _Holder:
    """Parse the content of a lock file; return an empty holder if it is unreadable."""
    try:
        fields = json.loads(text or "")
        words = {name: str(fields[name]) for name in ("host", "machine", "born", "since")}
        return _Holder(pid=int(fields["pid"]), **words)
    except (ValueError, TypeError, KeyError):
        return _Holder()


@contextmanager
def hold_run_dir(directory: Path) -> Iterator[Callable[[], None]]:
    """Context manager that creates and locks a run directory. Collective; rank 0 holds the lock.

    Yields:
        function that all processes call before they write files; it raises `DistributedError` on
        all processes if another run has taken over the directory.

    Raises:
        ConfigError: another living run holds the lock.
    """

    def take() -> RunLock:
        directory.mkdir(parents=True, exist_ok=True)
        lock = RunLock(directory)
        lock.take()
        return lock

    lock = run_on_first(take)
    try:
        yield lambda: run_on_first(lambda: None if lock is None else lock.check())
    finally:
        if lock is not None:
            lock.release()

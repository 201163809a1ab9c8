"""One run at a time in a directory: a file says whose it is, and its time that this one lives.

File systems that machines share often have no locks, so the file itself is the lock: it is made as
a whole or not at all, and touched as long as its holder lives. A holder of the same machine that is
gone is seen at once; of another machine's, whether its file is still touched.
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
_LOOKS = 7  # so many beats without a touch, and the holder is gone


@dataclass(frozen=True)
class _Holder:
    """A process; unknown words are empty.

    Args:
        host: the machine's name, for people.
        machine: what tells it, and what its processes are counted in, from all others.
        pid: the process's number there.
        born: what tells it from an earlier one of that number.
        since: when it took the directory.
    """

    host: str = ""
    machine: str = ""
    pid: int = 0
    born: str = ""
    since: str = ""

    def is_process(self, other: _Holder) -> bool:
        """Tell whether both are the same process."""
        return (self.machine, self.pid, self.born) == (other.machine, other.pid, other.born)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}" if self.pid else "a process"


def _read_word(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:  # another system than Linux
        return ""


def _birth_of(pid: int) -> str:
    """Return when a process of this machine began; "" where it is gone or that is not known."""
    state, *numbers = _read_word(f"/proc/{pid}/stat").rpartition(")")[2].split() or ["X"]
    return "" if state in "XZ" else numbers[18]


def _this_process() -> _Holder:
    try:
        counted_in = os.readlink("/proc/self/ns/pid")
    except OSError:
        counted_in = ""
    machine = f"{platform.node()} {_read_word('/proc/sys/kernel/random/boot_id')} {counted_in}"
    since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    return _Holder(platform.node(), machine, os.getpid(), _birth_of(os.getpid()), since)


class RunLock:
    """The lock of one directory; `take` it, `check` it before writing, `release` it.

    Args:
        directory: must be there.
        pause: waits so many seconds for the next look at a holder of another machine.
    """

    def __init__(self, directory: Path, pause: Callable[[float], None] = time.sleep) -> None:
        self._directory, self._file, self._pause = directory, directory / LOCK_NAME, pause
        self._me = _this_process()
        self._is_mine = False
        self._stop = threading.Event()
        self._beat = threading.Thread(target=self._touch, name="bmforge-run-lock", daemon=True)

    def take(self) -> None:
        """Take the directory; from a holder that is gone it is taken over.

        What this process holds already stays with who took it.

        Raises:
            ConfigError: a living process holds it.
        """
        while not self._make():
            text, touched = self._look()
            holder = _parse(text)
            if holder.is_process(self._me):
                return
            if text is not None and self._lives(holder, text, touched):
                raise ConfigError(
                    f"run_dir={str(self._directory)!r} is in use by {holder}. Wait for its end or "
                    f"stop it, or name another run_dir. (If no run is there, as in a copy of a "
                    f"directory in use, remove {self._file}.)"
                )
            if text is not None:
                self._remove(text, holder)
        self._is_mine = True
        self._beat.start()

    def check(self) -> None:
        """Raise where another one has taken the directory over; a removed lock is made again.

        Raises:
            DistributedError: it has.
        """
        if not self._is_mine:
            return
        holder = _parse(self._look()[0])
        if not holder.is_process(self._me) and not self._make():
            raise DistributedError(
                f"run_dir={str(self._directory)!r} was taken over by {holder}, as this process had "
                f"not touched {LOCK_NAME} for {_BEAT_S * _LOOKS:.0f} s. It writes nothing more."
            )

    def release(self) -> None:
        """Let the directory go."""
        if not self._is_mine:
            return
        self._stop.set()
        self._beat.join()
        if _parse(self._look()[0]).is_process(self._me):
            self._file.unlink(missing_ok=True)
        self._is_mine = False

    def _make(self) -> bool:
        """Make the file with all that is in it; False where there is one."""
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
            return beside.stat().st_nlink == 2  # some shares answer a repeated request so
        except OSError:  # a file system without links
            try:
                with self._file.open("x", encoding="utf-8") as file:
                    file.write(text)
            except FileExistsError:
                return False
        return True

    def _look(self) -> tuple[str | None, int]:
        """Return what the file holds, None where it is gone, and when it was touched."""
        try:
            with self._file.open(encoding="utf-8", errors="replace") as file:  # asks the server
                return file.read(), os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            return None, 0

    def _lives(self, holder: _Holder, text: str, touched: int) -> bool:
        if holder.machine == self._me.machine and holder.born:
            return _birth_of(holder.pid) == holder.born
        get_logger().warning(
            "%s is held by %s; looking for %.0f s whether it lives",
            *(self._directory, holder, _BEAT_S * _LOOKS),
        )
        for _ in range(_LOOKS):
            self._pause(_BEAT_S)
            if self._look() != (text, touched):
                return True
        return False

    def _remove(self, text: str, holder: _Holder) -> None:
        """Remove the lock of who is gone, and of no one else who may have come in between."""
        aside = self._file.with_name(f".{LOCK_NAME}.{os.urandom(4).hex()}")
        try:
            self._file.rename(aside)
        except FileNotFoundError:
            return
        if aside.read_text(encoding="utf-8", errors="replace") != text:
            aside.rename(self._file)
            return
        aside.unlink()
        get_logger().warning("%s: taken over from %s, which is gone", self._directory, holder)

    def _touch(self) -> None:
        while not self._stop.wait(_BEAT_S):
            try:
                if _parse(self._look()[0]).is_process(self._me):
                    os.utime(self._file)
            except OSError as error:  # the share may come back
                get_logger().debug("%s cannot be touched: %s", self._file, error)


def _parse(text: str | None) -> _Holder:
    """Return who wrote a lock; no one where that cannot be read."""
    try:
        found = json.loads(text or "")
        words = {name: str(found[name]) for name in ("host", "machine", "born", "since")}
        return _Holder(pid=int(found["pid"]), **words)
    except (ValueError, TypeError, KeyError):
        return _Holder()


@contextmanager
def hold_run_dir(directory: Path) -> Iterator[Callable[[], None]]:
    """Hold a run's directory, made if missing; rank 0 does it for all, who call it together.

    Yields:
        what all call before they write what another run would take for its own; it raises
        `DistributedError` on all where that one has taken the directory over.

    Raises:
        ConfigError: a living run holds it.
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

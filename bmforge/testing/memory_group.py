"""Limits and measures the memory of a process.

A control group counts a process's pages and its file cache. The process joins a new group after its
imports. Pages that it allocated before are still counted by the old group, so the new group counts
only later pages.

Source: the kernel's cgroup-v1/memory.rst and cgroup-v2.rst.
"""

from __future__ import annotations

import os
from pathlib import Path

from bmforge.host_memory import peak_resident_bytes, resident_bytes, trim_memory

__all__ = ["MemoryGroup", "ResidentSet", "limit_memory"]

_ROOT = Path("/sys/fs/cgroup")
# File names of a group's limit and peak usage, for cgroup versions 1 and 2.
_FILES = (
    ("memory.limit_in_bytes", "memory.max_usage_in_bytes"),
    ("memory.max", "memory.peak"),
)


class MemoryGroup:
    """A control group with a memory limit, created inside the control group of this process.

    Args:
        limit_bytes: limit above which the kernel kills the process.

    Raises:
        OSError: the system does not allow creating a group.
    """

    kind = "control group"

    def __init__(self, limit_bytes: int) -> None:
        own, (limit, self._peak) = _own_group()
        self._own, self._folder = own, own / f"bmforge-{os.getpid()}"
        self._folder.mkdir()
        try:
            (self._folder / limit).write_text(str(limit_bytes))
            trim_memory()
            (self._folder / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            self._folder.rmdir()
            raise

    def peak_bytes(self) -> int:
        """Return the peak memory usage of the group in bytes."""
        return int((self._folder / self._peak).read_text())

    def leave(self) -> None:
        """Move the process back to its original group, and remove this one."""
        (self._own / "cgroup.procs").write_text(str(os.getpid()))
        self._folder.rmdir()


class ResidentSet:
    """Measures the resident set size, without a limit, on systems without control groups."""

    kind = "resident set"

    def __init__(self) -> None:
        trim_memory()
        reset = Path("/proc/self/clear_refs")
        if reset.exists():
            reset.write_text("5")  # reset the peak
        self._before = resident_bytes()

    def peak_bytes(self) -> int:
        """Return the peak growth of the resident set in bytes."""
        return peak_resident_bytes() - self._before

    def leave(self) -> None:
        """Do nothing, since no control group was created."""


def limit_memory(limit_bytes: int) -> MemoryGroup | ResidentSet:
    """Limit the memory that this process uses from now on, or only measure it."""
    try:
        return MemoryGroup(limit_bytes)
    except OSError:
        return ResidentSet()


def _own_group() -> tuple[Path, tuple[str, str]]:
    """Return the directory of this process's group and the names of its files.

    Raises:
        OSError: the system has no control groups.
    """
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        is_first = "memory" in controllers.split(",")
        folder = (_ROOT / "memory" if is_first else _ROOT) / path.lstrip("/")
        names = _FILES[0 if is_first else 1]
        if (is_first or number == "0") and all((folder / name).exists() for name in names):
            return folder, names
    raise OSError("this process has no control group with a memory controller.")

"""How much memory the host has, has left and has given this process, containers included."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["available_host_bytes", "host_memory_bytes", "resident_bytes"]

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# What a control group calls its limit, its use, and the part of this that is file cache it gives
# up: in version 2, and in version 1 under memory/.
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def resident_bytes() -> int:
    """Return this process's resident set in bytes (0 where the system does not tell)."""
    statm = _PROC / "self/statm"
    if not statm.exists():
        return 0
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def host_memory_bytes() -> int:
    """Return the memory of the machine, or of the container that this process is in."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(limit for limit, _ in _container_limits())])


def available_host_bytes() -> int | None:
    """Return how much memory the system could still give this process.

    That is the least of what the machine has and what each container around the process allows.
    None where the system does not tell.
    """
    meminfo = _PROC / "meminfo"
    if not meminfo.exists():
        return None
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    machine = int(lines["MemAvailable"].split()[0]) * 1024
    return min([machine, *(max(0, limit - used) for limit, used in _container_limits())])


def _container_limits() -> Iterator[tuple[int, int]]:
    """Yield limit and use of every control group around this process that has a limit.

    Source: the kernel's cgroup-v2.rst and cgroup-v1/memory.rst. Use is counted as Kubernetes
    counts a working set: without inactive file cache.
    """
    own = _PROC / "self/cgroup"
    if not own.exists():
        return
    for line in own.read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, names = _CGROUPS, _VERSION_2
        elif "memory" in controllers.split(","):
            root, names = _CGROUPS / "memory", _VERSION_1
        else:
            continue
        # Inside of a container the group may be mounted as the root, and its path not be there.
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(root) and (found := _read_group(folder, names)):
                yield found


def _read_group(folder: Path, names: tuple[str, str, str]) -> tuple[int, int] | None:
    """Return limit and use of one control group, None where it has no limit."""
    try:
        limit, used = ((folder / name).read_text().strip() for name in names[:2])
        stat = (folder / "memory.stat").read_text().splitlines()
    except OSError:  # not a group of this version, or not ours to read
        return None
    if limit == "max":
        return None
    cache = next((line.split()[1] for line in stat if line.split()[0] == names[2]), "0")
    return int(limit), int(used) - int(cache)

"""How much memory the host has, has left and has given this process, containers included."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bmforge.errors import ConfigError

__all__ = [
    "available_host_bytes",
    "data_room_bytes",
    "host_memory_bytes",
    "peak_resident_bytes",
    "resident_bytes",
]

resource: Any
try:
    import resource
except ImportError:  # Windows has none
    resource = None

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# What a control group calls its limit, its use, and the part of this that is file cache it gives
# up: in version 2, and in version 1 under memory/.
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def resident_bytes() -> int:
    """Return this process's resident set in bytes (0 where the system does not tell)."""
    statm = _PROC / "self/statm"
    if statm.exists():
        return int(statm.read_text().split()[1]) * mmap.PAGESIZE
    found = _ask_windows()
    return 0 if found is None else found.resident


def peak_resident_bytes() -> int:
    """Return the largest resident set of this process so far (0 where the system does not tell)."""
    status = _read_status()
    if "VmHWM" in status:
        return int(status["VmHWM"].split()[0]) * 1024
    found = _ask_windows()
    if found is not None:
        return found.peak_resident
    if resource is None:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit


def data_room_bytes() -> int | None:
    """Return what a limit on this process's data (``ulimit -d``) leaves; None without a limit."""
    limit = -1 if resource is None else resource.getrlimit(resource.RLIMIT_DATA)[0]
    if resource is None or limit == resource.RLIM_INFINITY:
        return None
    status = _read_status()
    used = int(status["VmData"].split()[0]) * 1024 if "VmData" in status else resident_bytes()
    return int(0.97 * limit) - used


def _read_status() -> dict[str, str]:
    """Return the lines of Linux's own account of this process; {} elsewhere."""
    status = _PROC / "self/status"
    if not status.exists():
        return {}
    return dict(line.split(":", 1) for line in status.read_text().splitlines())


def host_memory_bytes() -> int:
    """Return the memory of the machine, or of the container that this process is in.

    Raises:
        ConfigError: the system does not tell.
    """
    found = _ask_windows()
    if found is not None:
        return found.total
    if not hasattr(os, "sysconf"):
        raise ConfigError(f"{sys.platform} does not tell how much memory the machine has.")
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(limit for limit, _ in _container_limits())])


def available_host_bytes() -> int | None:
    """Return how much memory the system could still give this process.

    That is the least of what the machine has and what each container around the process allows.
    None where the system does not tell.
    """
    meminfo = _PROC / "meminfo"
    if not meminfo.exists():
        found = _ask_windows()
        return None if found is None else found.available
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    machine = int(lines["MemAvailable"].split()[0]) * 1024
    return min([machine, *(max(0, limit - used) for limit, used in _container_limits())])


class _Windows(NamedTuple):
    total: int
    available: int
    resident: int
    peak_resident: int


def _ask_windows() -> _Windows | None:
    """Return what Windows tells in bytes; None on any other system.

    Source: GlobalMemoryStatusEx and GetProcessMemoryInfo in Microsoft's documentation.
    """
    loader = vars(ctypes).get("windll")
    if loader is None:
        return None
    kernel = loader.kernel32
    # MEMORYSTATUSEX: two DWORDs, then seven DWORDLONGs, of which the first two are physical memory.
    machine = (ctypes.c_uint64 * 8)()
    ctypes.cast(machine, ctypes.POINTER(ctypes.c_uint32))[0] = ctypes.sizeof(machine)
    kernel.GlobalMemoryStatusEx(machine)
    # PROCESS_MEMORY_COUNTERS: two DWORDs, then eight SIZE_Ts, of which the first is the peak.
    words = 8 // ctypes.sizeof(ctypes.c_size_t)
    own = (ctypes.c_size_t * (words + 8))()
    size = ctypes.c_uint32(ctypes.sizeof(own))
    ctypes.cast(own, ctypes.POINTER(ctypes.c_uint32))[0] = size.value
    current = kernel.GetCurrentProcess
    current.restype = ctypes.c_void_p
    kernel.K32GetProcessMemoryInfo(ctypes.c_void_p(current()), own, size)
    return _Windows(machine[1], machine[2], own[words + 1], own[words])


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

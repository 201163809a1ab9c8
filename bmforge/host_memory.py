"""Total, available and used memory of the host, of its container, and of this process."""

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
    "find_glibc",
    "trim_memory",
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
# Files and fields with a control group's limit, its use, and the reclaimable file cache in that
# use: in cgroup version 2, and in version 1 (under memory/).
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def resident_bytes() -> int:
    """Return this process's resident set size in bytes (0 if the system does not report it)."""
    statm = _PROC / "self/statm"
    if statm.exists():
        return int(statm.read_text().split()[1]) * mmap.PAGESIZE
    windows = _query_windows()
    return 0 if windows is None else windows.resident


def peak_resident_bytes() -> int:
    """Return this process's peak resident set size (0 if the system does not report it)."""
    status = _read_status()
    if "VmHWM" in status:
        return int(status["VmHWM"].split()[0]) * 1024
    windows = _query_windows()
    if windows is not None:
        return windows.peak_resident
    if resource is None:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit


def data_room_bytes() -> int | None:
    """Return the bytes that ``ulimit -d`` still lets this process allocate; None if unlimited."""
    limit = -1 if resource is None else resource.getrlimit(resource.RLIMIT_DATA)[0]
    if resource is None or limit == resource.RLIM_INFINITY:
        return None
    status = _read_status()
    used = int(status["VmData"].split()[0]) * 1024 if "VmData" in status else resident_bytes()
    return int(0.97 * limit) - used


def _read_status() -> dict[str, str]:
    """Return the fields of /proc/self/status; {} on systems other than Linux."""
    status = _PROC / "self/status"
    if not status.exists():
        return {}
    return dict(line.split(":", 1) for line in status.read_text().splitlines())


def host_memory_bytes() -> int:
    """Return the memory of the machine, or of the container around this process.

    Raises:
        ConfigError: the system does not report its memory size.
    """
    windows = _query_windows()
    if windows is not None:
        return windows.total
    if not hasattr(os, "sysconf"):
        raise ConfigError(
            "the memory size of this machine is unknown, because Python cannot read it on "
            f"{sys.platform}. Use Linux, macOS or Windows."
        )
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(limit for limit, _ in _container_limits())])


def available_host_bytes() -> int | None:
    """Return the bytes that this process can still allocate; None if the system cannot tell.

    This is the minimum over the machine and all containers around the process.
    """
    meminfo = _PROC / "meminfo"
    if not meminfo.exists():
        windows = _query_windows()
        return None if windows is None else windows.available
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    machine = int(lines["MemAvailable"].split()[0]) * 1024
    return min([machine, *(max(0, limit - used) for limit, used in _container_limits())])


class _Windows(NamedTuple):
    total: int
    available: int
    resident: int
    peak_resident: int


def _query_windows() -> _Windows | None:
    """Query the memory of machine and process on Windows, in bytes; None on other systems.

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
    """Yield the limit and use of every control group around this process that has a limit.

    The use excludes inactive file cache, as in Kubernetes' working set.

    Source: the kernel's cgroup-v2.rst and cgroup-v1/memory.rst.
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
        # In a container the group may be mounted as the root, so that its path does not exist.
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(root) and (usage := _read_group(folder, names)):
                yield usage


def _read_group(folder: Path, names: tuple[str, str, str]) -> tuple[int, int] | None:
    """Return the limit and use of one control group; None if it has no limit."""
    try:
        limit, used = ((folder / name).read_text().strip() for name in names[:2])
        stat = (folder / "memory.stat").read_text().splitlines()
    except OSError:  # another cgroup version, or no permission
        return None
    if limit == "max":
        return None
    cache = next((line.split()[1] for line in stat if line.split()[0] == names[2]), "0")
    return int(limit), int(used) - int(cache)


def trim_memory() -> None:
    """Make glibc return all freed memory of this process to the operating system."""
    library = find_glibc()
    if library is not None:
        library.malloc_trim(0)


def find_glibc() -> ctypes.CDLL | None:
    """Return the C library, or None unless it is glibc and its allocator is in use."""
    if not sys.platform.startswith("linux"):
        return None
    process = ctypes.CDLL(None)
    if not hasattr(process, "gnu_get_libc_version"):  # musl
        return None
    glibc = ctypes.CDLL("libc.so.6")
    used, own = (ctypes.cast(lib.malloc, ctypes.c_void_p).value for lib in (process, glibc))
    return glibc if used == own else None  # jemalloc and others replace malloc

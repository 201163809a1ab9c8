"""Host settings for long computations: keep freed memory, and use faster matrix products.

The settings change only the order of summation, not what is computed. The environment variable
``BMFORGE_HOST_TUNING`` selects the settings: ``memory,products`` (default), one of them, or
``none``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from bmforge.device import fast_products, is_host
from bmforge.errors import ConfigError, suggest
from bmforge.host_memory import find_glibc, resident_bytes, trim_memory
from bmforge.logging import get_logger

__all__ = [
    "MemoryWatch",
    "keep_freed_memory",
    "read_tuning",
    "recommend_threads",
    "return_freed_memory",
    "tune_host",
    "warn_if_busy",
]

_VARIABLE = "BMFORGE_HOST_TUNING"
_WORDS = ("memory", "products")
# mallopt(3), from glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4
_LARGEST_INT = 2**31 - 1
_LARGE_BLOCK, _PAD, _RETURNED_BLOCK = 1 << 30, 64 << 20, 1 << 18
_SETTLED_STEPS, _GROWTH = 3, 1.25
_STAT, _SAMPLE_S = Path("/proc/stat"), 0.25
_BUSY_CORES = 0.5  # busy cores from which the warning is logged


def read_tuning() -> frozenset[str]:
    """Return the host settings to apply, from the environment variable.

    Raises:
        ConfigError: the variable has an unknown value.
    """
    value = os.environ.get(_VARIABLE, ",".join(_WORDS))
    words = frozenset(word.strip() for word in value.split(",") if word.strip())
    unknown = sorted(words - {*_WORDS, "none"})
    if unknown or ("none" in words and len(words) > 1):
        hint = suggest(unknown[0], [*_WORDS, "none"]) if unknown else ""
        raise ConfigError(
            f"unknown value: {_VARIABLE}={value!r} (allowed: none, or a comma-separated list of "
            f"{', '.join(_WORDS)}).{hint}"
        )
    return words - {"none"}


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory for later allocations; return True if this worked.

    By default glibc maps each large block anew and unmaps it when it is freed, so that every
    training step page-faults its activations in again. Blocks of 1 GiB or more are still returned
    to the system; if glibc is too old for that threshold, all blocks are kept. Other allocators are
    not affected.
    """
    library = find_glibc()
    if library is None:
        return False
    keeps = library.mallopt(_MMAP_THRESHOLD, _LARGE_BLOCK) or library.mallopt(_MMAP_MAX, 0)
    trims = library.mallopt(_TRIM_THRESHOLD, _LARGEST_INT)
    return bool(keeps and trims and library.mallopt(_TOP_PAD, _PAD))


def return_freed_memory() -> bool:
    """Make glibc return freed blocks of 256 KiB or more immediately; return True if this worked.

    By default glibc raises this threshold over time, per thread. Freed memory between long-lived
    blocks is then often too small for later blocks, and the process exceeds its memory budget.
    """
    library = find_glibc()
    return library is not None and bool(library.mallopt(_MMAP_THRESHOLD, _RETURNED_BLOCK))


def warn_if_busy() -> None:
    """Log a warning if other processes use cores that this process has threads for.

    OpenMP's threads spin while they wait for each other, so one thread without a core slows down
    all of them: with 2 threads and one busy core, decoding a small model was more than ten times
    slower than with 1 thread. The number of threads is not changed, because it changes the order
    of summation, and results must not depend on the load of the machine. A number that the user
    or torchrun has set in OMP_NUM_THREADS is accepted without a warning.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    threads = torch.get_num_threads()
    fewer, busy = recommend_threads(threads)
    if fewer == threads:
        return
    get_logger().warning(
        "other processes use %.1f CPU cores, so the %d threads of this process wait for each "
        "other and can be more than ten times slower. To avoid this, start the command with "
        "OMP_NUM_THREADS=%d, as in `OMP_NUM_THREADS=%d bmforge ...`.",
        *(busy, threads, fewer, fewer),
    )


def recommend_threads(threads: int) -> tuple[int, float]:
    """Return the number of threads that have an idle core, and the cores other processes use.

    Args:
        threads: number of threads now, which is also the largest number returned.
    """
    if threads == 1:
        return 1, 0.0
    idle, cores = _measure_idle_cores()
    if idle > threads - _BUSY_CORES:
        return threads, cores - idle
    return max(1, min(threads - 1, round(idle))), cores - idle


def _measure_idle_cores() -> tuple[float, int]:
    """Return how many cores other processes leave idle, and how many this process may use.

    Both numbers are equal where the system does not report the time of its cores.
    """
    before, start = _read_core_times(), time.process_time()
    if not before:
        count = os.cpu_count() or 1
        return float(count), count
    time.sleep(_SAMPLE_S)
    after, own = _read_core_times(), (time.process_time() - start) / _SAMPLE_S
    idle = own
    for core, (idle_before, total_before) in before.items():
        idle_after, total_after = after.get(core, (idle_before, total_before))
        total = total_after - total_before
        idle += (idle_after - idle_before) / total if total else 1.0
    return min(idle, float(len(before))), len(before)


def _read_core_times() -> dict[int, tuple[int, int]]:
    """Return the idle and the total ticks of the cores that this process may use, from proc(5)."""
    if not _STAT.exists():
        return {}
    allowed = os.sched_getaffinity(0)
    times = {}
    for line in _STAT.read_text().splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in allowed:
            # user, nice, system, idle, iowait, irq, softirq, steal; guest is part of user.
            ticks = [int(field) for field in fields[:8]]
            times[int(name[3:])] = sum(ticks[3:5]), sum(ticks)
    return times


class MemoryWatch:
    """Returns freed memory to the system if a process keeps too much of it between steps."""

    def __init__(self) -> None:
        self._steps, self._bound = 0, 0

    def note_step(self) -> None:
        """Return freed memory to the system if the resident set has grown by a quarter.

        Call it after every step; the first steps define the normal size.
        """
        resident = resident_bytes()
        self._steps += 1
        if self._steps <= _SETTLED_STEPS:
            self._bound = max(self._bound, int(_GROWTH * resident))
        elif resident > self._bound:
            trim_memory()
            get_logger().info(
                (
                    "freed memory was returned to the system: the process used %.2f GB before, "
                    "and uses %.2f GB now"
                ),
                resident / 1e9,
                resident_bytes() / 1e9,
            )
            self._bound = int(_GROWTH * resident)


@contextmanager
def tune_host(device: torch.device) -> Iterator[MemoryWatch | None]:
    """Context manager that applies and logs the host settings for a long computation.

    The setting of matrix products is restored on exit; freed memory is still kept afterwards.

    Args:
        device: device of the computation; settings are changed only for the CPU.

    Yields:
        a `MemoryWatch` to call after every step, if freed memory is kept.
    """
    words = read_tuning() if is_host(device) else frozenset()
    if is_host(device):
        warn_if_busy()
    with ExitStack() as stack:
        messages = []
        watch = MemoryWatch() if "memory" in words and keep_freed_memory() else None
        if watch is not None:
            messages.append("glibc keeps freed memory for the next step")
        if "products" in words and stack.enter_context(fast_products()):
            messages.append("fp32 matrix products use oneDNN, which is faster on this CPU")
        if messages:
            get_logger().info(
                "settings of the CPU: %s (%s=none turns them off)",
                "; ".join(messages),
                _VARIABLE,
                extra={"file_only": True},  # of use only to those who compare runs
            )
        yield watch

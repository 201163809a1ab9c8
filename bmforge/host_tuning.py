"""Host settings for long computations: keep freed memory, and use faster matrix products.

The settings change only the order of summation, not what is computed. The environment variable
``BMFORGE_HOST_TUNING`` selects the settings: ``memory,products`` (default), one of them, or
``none``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from bmforge.device import fast_products, is_host
from bmforge.errors import ConfigError, suggest
from bmforge.host_memory import find_glibc, resident_bytes, trim_memory
from bmforge.logging import get_logger

__all__ = [
    "MemoryWatch",
    "keep_freed_memory",
    "read_tuning",
    "return_freed_memory",
    "tune_host",
]

_VARIABLE = "BMFORGE_HOST_TUNING"
_WORDS = ("memory", "products")
# mallopt(3), from glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4
_LARGEST_INT = 2**31 - 1
_LARGE_BLOCK, _PAD, _RETURNED_BLOCK = 1 << 30, 64 << 20, 1 << 18
_SETTLED_STEPS, _GROWTH = 3, 1.25


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
    with ExitStack() as stack:
        messages = []
        watch = MemoryWatch() if "memory" in words and keep_freed_memory() else None
        if watch is not None:
            messages.append("freed memory is kept for the next step")
        if "products" in words and stack.enter_context(fast_products()):
            messages.append("fp32 matrix products use oneDNN, which is faster on this CPU")
        if messages:
            get_logger().info("%s (%s=none turns this off)", "; ".join(messages), _VARIABLE)
        yield watch

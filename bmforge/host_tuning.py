"""What a long computation asks of its host: to keep freed memory, and the faster products.

Neither changes what is computed beyond the order of summation. ``BMFORGE_HOST_TUNING`` says which:
``memory,products`` is the default, ``none`` leaves the process as it was.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from bmforge.device import fast_products, is_host
from bmforge.errors import ConfigError, suggest
from bmforge.host_memory import resident_bytes
from bmforge.logging import get_logger

__all__ = [
    "MemoryWatch",
    "give_back_memory",
    "keep_freed_memory",
    "read_tuning",
    "return_freed_memory",
    "tuned_host",
]

_VARIABLE = "BMFORGE_HOST_TUNING"
_WORDS = ("memory", "products")
# mallopt(3), from glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4
_LARGEST_INT = 2**31 - 1
_LARGE_BLOCK, _PAD, _RETURNED_BLOCK = 1 << 30, 64 << 20, 1 << 18
_SETTLED_STEPS, _GROWTH = 3, 1.25


def read_tuning() -> frozenset[str]:
    """Return what may be asked of the host: ``memory``, ``products``, both or neither.

    Raises:
        ConfigError: the environment variable names something else.
    """
    given = os.environ.get(_VARIABLE, ",".join(_WORDS))
    words = frozenset(word.strip() for word in given.split(",") if word.strip())
    unknown = sorted(words - {*_WORDS, "none"})
    if unknown or ("none" in words and len(words) > 1):
        hint = suggest(unknown[0], [*_WORDS, "none"]) if unknown else ""
        raise ConfigError(
            f"{_VARIABLE}={given!r} is not understood.{hint} It is none, or some of "
            f"{', '.join(_WORDS)} with commas between them."
        )
    return words - {"none"}


def keep_freed_memory() -> bool:
    """Let this process keep the memory it frees, for what it allocates next; tell if it does.

    By default glibc takes every large block from the system and gives it back when it is freed, so
    each training step faults its activations in anew. Blocks of 1 GiB and more still go back; where
    glibc is too old for such a threshold, all are kept. With another allocator nothing happens.
    """
    library = _glibc()
    if library is None:
        return False
    kept = library.mallopt(_MMAP_THRESHOLD, _LARGE_BLOCK) or library.mallopt(_MMAP_MAX, 0)
    trims = library.mallopt(_TRIM_THRESHOLD, _LARGEST_INT)
    return bool(kept and trims and library.mallopt(_TOP_PAD, _PAD))


def return_freed_memory() -> bool:
    """Let this process give freed blocks of 256 KiB and more back at once; tell if it does.

    By default glibc keeps larger and larger ones, apart for every thread, and what lives long
    between what does not leaves holes that no later block fills: a process that was given a budget
    then outgrows it.
    """
    library = _glibc()
    return library is not None and bool(library.mallopt(_MMAP_THRESHOLD, _RETURNED_BLOCK))


def give_back_memory() -> None:
    """Give the freed memory that this process keeps back to the system."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    """Return the C library where it is glibc and its allocator is the one in use."""
    if not sys.platform.startswith("linux"):
        return None
    here = ctypes.CDLL(None)
    if not hasattr(here, "gnu_get_libc_version"):  # musl
        return None
    own = ctypes.CDLL("libc.so.6")
    used, its = (ctypes.cast(one.malloc, ctypes.c_void_p).value for one in (here, own))
    return own if used == its else None  # jemalloc and others stand in front


class MemoryWatch:
    """Sees to it that what a process keeps between steps does not grow without end."""

    def __init__(self) -> None:
        self._steps, self._bound = 0, 0

    def note_step(self) -> None:
        """Look at the resident set after a step; give memory back where it has grown by a quarter.

        The first steps say what is usual.
        """
        resident = resident_bytes()
        self._steps += 1
        if self._steps <= _SETTLED_STEPS:
            self._bound = max(self._bound, int(_GROWTH * resident))
        elif resident > self._bound:
            give_back_memory()
            get_logger().info(
                "the process grew to %.2f GB; what it had kept of freed memory was given back, "
                "which leaves %.2f GB",
                resident / 1e9,
                resident_bytes() / 1e9,
            )
            self._bound = int(_GROWTH * resident)


@contextmanager
def tuned_host(device: torch.device) -> Iterator[MemoryWatch | None]:
    """Ask the host for what makes a long computation on `device` fast, and say so.

    Freed memory is kept from here on; products are as before when it is over.

    Args:
        device: nothing is asked where it is not the host itself.

    Yields:
        what is to be told of every step, where memory is kept.
    """
    words = read_tuning() if is_host(device) else frozenset()
    with ExitStack() as stack:
        said = []
        watch = MemoryWatch() if "memory" in words and keep_freed_memory() else None
        if watch is not None:
            said.append("freed memory is kept for the next step")
        if "products" in words and stack.enter_context(fast_products()):
            said.append("fp32 products go through oneDNN, which is faster on this CPU")
        if said:
            get_logger().info("%s (%s=none: neither)", "; ".join(said), _VARIABLE)
        yield watch

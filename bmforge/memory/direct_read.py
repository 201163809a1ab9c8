"""Reading files past the page cache, into memory of our own.

What is read once a pass would push everything else out of the page cache, and where a limit counts
the cache as the process's memory, reading through it works against the limit. Where a file system
refuses direct reads, files are read as usual and the cache is told to forget what was read.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import Any

__all__ = ["BUFFER_BYTES", "READ_THREADS", "DirectReads"]

# A disk with a queue is at its best with several requests at a time.
READ_THREADS = 4
# Of a disk's sectors and of memory's pages; direct reads begin and end at multiples of it.
_ALIGN_BYTES = 4096
# Of each thread that reads.
BUFFER_BYTES = 1 << 20

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None


class DirectReads:
    """Opens files and reads parts of them, from any number of threads at a time.

    Memory: `BUFFER_BYTES` for each thread that reads at the same time, kept for the next.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []  # taken and given back by one operation each

    def open(self, path: Path) -> int:
        """Return a descriptor of a file.

        Raises:
            OSError: it cannot be opened.
        """
        flags = os.O_RDONLY | getattr(os, "O_BINARY", 0)
        direct = getattr(os, "O_DIRECT", 0)
        try:
            return os.open(path, flags | direct)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
        return os.open(path, flags)

    def read_into(self, descriptor: int, target: memoryview, offset: int) -> None:
        """Fill `target` with a file's bytes from `offset` on.

        Raises:
            OSError: the file ends before that, or cannot be read.
        """
        buffer = self._free.pop() if self._free else mmap.mmap(-1, BUFFER_BYTES)
        try:
            self._read(descriptor, target, offset, memoryview(buffer))
        finally:
            self._free.append(buffer)

    def _read(self, descriptor: int, target: memoryview, offset: int, buffer: memoryview) -> None:
        done = 0
        while done < len(target):
            skipped = (offset + done) % _ALIGN_BYTES
            start = offset + done - skipped
            wanted = min(len(buffer), _round_up(skipped + len(target) - done))
            got = _read_once(descriptor, buffer[:wanted], start) - skipped
            if got <= 0:
                raise OSError(f"it ends at byte {offset + done}, {len(target) - done} bytes early")
            count = min(got, len(target) - done)
            target[done : done + count] = buffer[skipped : skipped + count]
            done += count


def _round_up(size: int) -> int:
    return -(-size // _ALIGN_BYTES) * _ALIGN_BYTES


def _read_once(descriptor: int, buffer: memoryview, start: int) -> int:
    """Read into an aligned buffer from an aligned place; return how many bytes came."""
    try:
        got = os.preadv(descriptor, [buffer], start)
    except OSError as error:
        if error.errno != errno.EINVAL or not _is_direct(descriptor):
            raise
        # The file system takes the flag and refuses the read.
        fcntl.fcntl(descriptor, fcntl.F_SETFL, 0)
        got = os.preadv(descriptor, [buffer], start)
    if hasattr(os, "posix_fadvise") and not _is_direct(descriptor):
        os.posix_fadvise(descriptor, start, len(buffer), os.POSIX_FADV_DONTNEED)
    return got


def _is_direct(descriptor: int) -> bool:
    if fcntl is None or not hasattr(os, "O_DIRECT"):
        return False
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)

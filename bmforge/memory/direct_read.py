"""Direct I/O: file reads that bypass the page cache.

Weights that are streamed in every pass would evict everything else from the page cache. If a
memory limit includes the cache, buffered reads also count toward it. On file systems without direct
reads, files are read with buffering and dropped from the cache afterwards.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import Any

__all__ = ["BUFFER_BYTES", "READ_THREADS", "DirectReader"]

# Disks with command queues are fastest with several concurrent requests.
READ_THREADS = 4
# Alignment of direct reads in bytes, a multiple of the sector and the page size.
_ALIGN_BYTES = 4096
# Buffer size per reading thread.
BUFFER_BYTES = 1 << 20

fcntl: Any
try:
    import fcntl
except ImportError:  # not available on Windows
    fcntl = None


class DirectReader:
    """Opens files and reads byte ranges; safe to use from several threads.

    Memory: one reused buffer of `BUFFER_BYTES` per concurrent reader.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []  # pop and append are atomic

    def open(self, path: Path) -> int:
        """Open a file and return its descriptor.

        Raises:
            OSError: the file cannot be opened.
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
        """Fill `target` with the bytes of a file from `offset`.

        Raises:
            OSError: the file is too short, or cannot be read.
        """
        # An anonymous mapping starts at a page, as direct reads require; `bytearray` does not.
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
            num_bytes = min(len(buffer), _round_up(skipped + len(target) - done))
            got = _read_once(descriptor, buffer[:num_bytes], start) - skipped
            if got <= 0:
                raise OSError(
                    f"the file is truncated: it ends at byte {offset + done}, "
                    f"{len(target) - done} bytes early."
                )
            count = min(got, len(target) - done)
            target[done : done + count] = buffer[skipped : skipped + count]
            done += count


def _round_up(size: int) -> int:
    return -(-size // _ALIGN_BYTES) * _ALIGN_BYTES


def _read_once(descriptor: int, buffer: memoryview, start: int) -> int:
    """Read from an aligned offset into an aligned buffer; return the number of bytes read."""
    try:
        got = os.preadv(descriptor, [buffer], start)
    except OSError as error:
        if error.errno != errno.EINVAL or not _is_direct(descriptor):
            raise
        # Some file systems accept O_DIRECT in open and refuse the read.
        fcntl.fcntl(descriptor, fcntl.F_SETFL, 0)
        got = os.preadv(descriptor, [buffer], start)
    if hasattr(os, "posix_fadvise") and not _is_direct(descriptor):
        os.posix_fadvise(descriptor, start, len(buffer), os.POSIX_FADV_DONTNEED)
    return got


def _is_direct(descriptor: int) -> bool:
    if fcntl is None or not hasattr(os, "O_DIRECT"):
        return False
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)

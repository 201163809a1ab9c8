"""A directory for weights that were packed to be opened, which goes with the process that made it.

A process that is killed cannot tidy up. So it holds a lock on its directory for as long as it
lives, and whoever makes the next directory in the same place removes those that nobody holds.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from bmforge.errors import ConfigError
from bmforge.logging import get_logger
from bmforge.memory.spill import format_bytes

fcntl: Any
try:
    import fcntl
except ImportError:  # no such locks here: what is left behind stays
    fcntl = None

__all__ = ["make_packed_place", "reporting_full_disk"]

_PREFIX = "bmforge-packed-"


def make_packed_place(folder: Path | None) -> tuple[Path, Callable[[], None]]:
    """Return a new directory, and what removes it again.

    Args:
        folder: where it lies; None is the system's temporary directory.
    """
    parent = Path(tempfile.gettempdir() if folder is None else folder)
    _remove_abandoned(parent)
    while True:
        try:
            place = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        except OSError as error:
            raise ConfigError(
                f"EngineConfig.spill_directory={str(parent)!r} cannot be used ({error.strerror}). "
                "Name a directory that exists and can be written."
            ) from error
        descriptor = None if fcntl is None else os.open(place, os.O_RDONLY)
        if descriptor is None or _hold(place, descriptor):
            break
        os.close(descriptor)

    def give_back() -> None:
        shutil.rmtree(place, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)

    return place, give_back


@contextmanager
def reporting_full_disk(folder: Path, weights: Iterable[Tensor]) -> Iterator[None]:
    """Raise `ConfigError` if a disk has less room than packed weights need, or becomes full.

    Args:
        folder: directory that they are written to.
        weights: the packed weights, which may be on meta.
    """
    needed_bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights)
    try:
        free_bytes = shutil.disk_usage(folder).free
        if free_bytes < needed_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS):
            raise
        raise ConfigError(
            f"EngineConfig.spill_directory={str(folder.parent)!r} has {format_bytes(free_bytes)} "
            f"free and {format_bytes(needed_bytes)} are needed ({error.strerror}). Free some, or "
            "name a directory on another disk."
        ) from error


def _hold(place: Path, descriptor: int) -> bool:
    """Lock a new directory; tell whether it is still there, as somebody may have removed it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:  # a file system without locks, where nobody else gets one either
        return True
    return place.exists()


def _remove_abandoned(parent: Path) -> None:
    """Remove directories whose processes are gone."""
    for place in parent.glob(f"{_PREFIX}*") if fcntl is not None else ():
        try:
            descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # another person's, or gone meanwhile
            continue
        try:
            if os.fstat(descriptor).st_uid == os.getuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(place, ignore_errors=True)
                get_logger().info("removed %s, which a process that ended has left", place)
        except OSError:  # its process lives
            continue
        finally:
            os.close(descriptor)

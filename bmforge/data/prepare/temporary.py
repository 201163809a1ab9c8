"""Temporary directory of multiprocessing: removes those that killed runs have left.

The fork server's socket is in a directory ``pymp-*`` that Python removes when the process exits. A
process killed by SIGKILL leaves it behind, so each run removes the directories of dead runs.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from multiprocessing import util
from pathlib import Path

__all__ = ["mark_temporary_dir"]

_MARK = "bmforge.lock"
_marks: dict[Path, int] = {}  # own mark -> descriptor, whose lock ends with the process


def mark_temporary_dir() -> None:
    """Lock a file in this process's temporary directory, and remove directories of dead runs.

    Only directories with such a file are removed, and only if no process locks it.
    """
    import fcntl

    own = Path(util.get_temp_dir()) / _MARK
    if own in _marks:
        return
    for mark in Path(tempfile.gettempdir()).glob(f"pymp-*/{_MARK}"):
        try:
            descriptor = os.open(mark, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # another user's, or removed in the meantime
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(mark.parent, ignore_errors=True)
        except BlockingIOError:  # its run is alive
            continue
        finally:
            os.close(descriptor)
    # The file gets its name after it is locked: otherwise another run could remove it.
    unnamed = own.with_suffix(f".{os.getpid()}")
    _marks[own] = os.open(unnamed, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(_marks[own], fcntl.LOCK_EX)
    unnamed.rename(own)

"""``python -m bmforge`` is the command line, also under torchrun."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn

from bmforge.cli import main

__all__ = ["leave"]


def leave(status: int) -> NoReturn:
    """End the program; as one of several processes without taking the interpreter apart.

    A thread of gloo lets go of the last collective's tensors, for which it needs the interpreter;
    where that is already ending, the process aborts, and a run that ended well counts as failed.
    """
    if "RANK" not in os.environ:
        sys.exit(status)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()  # as the interpreter would: one may be writing a checkpoint
    distributed = sys.modules.get("bmforge.parallel.distributed")
    if distributed is not None:
        atexit.unregister(distributed.leave_at_exit)  # who failed must not wait for others
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(main())

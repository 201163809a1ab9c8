"""Entry point of ``python -m bmforge``, the command line, also under torchrun."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn

from bmforge.cli import main

__all__ = ["exit_process"]


def exit_process(status: int) -> NoReturn:
    """Exit the program; a process of a distributed job skips the interpreter's shutdown.

    A gloo thread needs the interpreter to release the tensors of the last collective. If the
    interpreter is already shutting down, the process aborts, and the launcher reports a successful
    run as failed.
    """
    if "RANK" not in os.environ:
        sys.exit(status)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()  # as the interpreter would: a thread may be writing a checkpoint
    distributed = sys.modules.get("bmforge.parallel.distributed")
    if distributed is not None:
        atexit.unregister(distributed.leave_at_exit)  # a failed rank must not wait for others
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    exit_process(main())

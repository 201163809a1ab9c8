"""``python -m bmforge`` is the command line, also under torchrun."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn

from bmforge.cli import main

__all__ = ["leave"]


def leave(status: int) -> NoReturn:
    """End the program; as one of several processes without taking the interpreter apart.

    torch's caches keep process groups after they were left. Their threads then die in whatever
    order the interpreter drops things, which now and then aborts a run that had ended well.
    """
    if "RANK" not in os.environ:
        sys.exit(status)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(main())

"""``python -m bmforge`` is the command line, also under torchrun."""

import sys

from bmforge.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())

"""Command line interface: each command parses its arguments and calls one function.

Start reading at `commands.py`, the table of commands; `options.py` has their options, and each
command has its own file, which is imported only when the command runs.
"""

from bmforge.cli.main import main

__all__ = ["main"]

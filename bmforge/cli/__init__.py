"""Command line interface: each command parses its arguments and calls one function.

Start reading at `commands.py`, the table of commands. Their options are in `options.py`. Each
command has its own file, which is imported only when the command runs.
"""

from bmforge.cli.main import main

__all__ = ["main"]

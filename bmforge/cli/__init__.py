"""Command line interface: each command parses its arguments and calls one function.

Start reading at `commands.py`, the table of commands. The options are in `options.py`. Each command
has a separate module, which is imported only when the command runs.
"""

from bmforge.cli.main import main

__all__ = ["main"]
